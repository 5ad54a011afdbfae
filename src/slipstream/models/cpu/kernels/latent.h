// Latent attention of one layer: the cache holds for each token one vector, a latent and the rotated part of a key that all
// heads share, and a head's weights go into its queries and into what it has attended to, instead of into the cache
// (DeepSeek-V2, arXiv:2405.04434, section 2.1).
//
// A head's weight [nope + value, rank] is read as the checkpoint has it, its rows being sums' terms for queries and outputs
// for values. Terms are added in the weight's order, output by output, so that a row's bits depend on its own numbers alone.
#pragma once

#include "worker.h"

constexpr int LATENT_ROWS = 32;   // rows that go through a head's weight together
constexpr int LATENT_BLOCK = 16;  // rows of the weight that stay in the nearest cache meanwhile
constexpr int MOST_TOGETHER = LANES == 16 ? 6 : QUERIES;  // rows that one loop serves

struct Latent {
  int32_t num_rows, num_heads;
  int32_t rank, rope;         // numbers of the latent, a multiple of WIDE, and of the rotated part
  int32_t nope, value;        // numbers of a head's query without the rotated part, and of its value
  int32_t weight_kind, entry_type;
  float scale, unused;
  int64_t num_slots;
  int64_t query_row, query_head;  // numbers from one row's queries to the next's, and from one head's
  const void* weight;             // [heads, nope + value, rank] of a kind of floating-point weight
  const float* queries;           // [nope + rope] each
  const float* made;              // [rows, rank + rope]: what is to be kept of the rows
  const int64_t* slots;           // [rows]
  void* numbers;                  // [num_slots, rank + rope]
  float* scales;                  // [num_slots], for int8
  float* out;                     // [rows, heads, value]
  Sight sight;

  int width() const { return rank + rope; }
  Entries entries(int dim) const { return {entry_type, dim, num_slots, numbers, scales, width()}; }
};

// Room for a layer's rows, and for what a thread multiplies. All of it is had before the threads start.
struct LatentScratch : AttentionScratch {
  std::vector<float> absorbed, attended;  // [rows, heads, rank + rope], [rows, heads, rank]
  std::vector<std::vector<float>> desks;  // of each thread

  static size_t desk_numbers(const Latent& l) { return size_t(LATENT_ROWS) * (PARTITION + l.rank); }

  void reserve(const Latent& l, int threads) {
    make_room(absorbed, size_t(l.num_rows) * l.num_heads * l.width());
    make_room(attended, size_t(l.num_rows) * l.num_heads * l.rank);
    if (desks.size() < size_t(threads)) desks.resize(threads);
    for (auto& desk : desks) make_room(desk, desk_numbers(l));
    AttentionScratch::reserve(l.sight, l.num_rows, l.num_heads, 1, l.width(), threads);
  }

  size_t num_bytes() const {
    size_t total = bytes_of(absorbed) + bytes_of(attended) + AttentionScratch::num_bytes();
    for (const auto& desk : desks) total += bytes_of(desk);
    return total;
  }
};

class LatentPass {
 public:
  LatentPass(const Latent& latent, LatentScratch& scratch, Team& team, int rank) : l(latent), s(scratch), team(team), rank(rank) {}

  static int num_operations(const LatentScratch& scratch) { return 2 + scratch.plan.num_operations(); }

  void run() {
    const int blocks = (l.num_rows + LATENT_ROWS - 1) / LATENT_ROWS;
    // The first operation stores the rows too; no row is read before it is over.
    team.share(operation++, l.num_heads * blocks + l.num_rows, [&](int part) {
      const int row = part - l.num_heads * blocks;
      if (row >= 0) return l.entries(l.width()).write(0, l.slots[row], l.made + size_t(row) * l.width());
      of_block(part / blocks, part % blocks, [&](auto weight, int head, int first, int end) { absorb(weight, head, first, end); });
    });
    attend();
    team.share(operation++, l.num_heads * blocks, [&](int part) {
      of_block(part / blocks, part % blocks, [&](auto weight, int head, int first, int end) { expand(weight, head, first, end); });
    });
  }

 private:
  const Latent& l;
  LatentScratch& s;
  Team& team;
  const int rank;
  int operation = 0;

  // take(a head's weight, the head, the first of some rows, their end)
  template <typename Take>
  void of_block(int head, int block, Take take) {
    const int first = block * LATENT_ROWS, end = std::min(first + LATENT_ROWS, l.num_rows);
    const size_t begin = size_t(head) * (l.nope + l.value) * l.rank;
    switch (l.weight_kind) {
      case BFLOAT16: return take((const bfloat16*)l.weight + begin, head, first, end);
      case FLOAT16: return take((const float16*)l.weight + begin, head, first, end);
      default: return take((const float*)l.weight + begin, head, first, end);
    }
  }

  // each(first row, how many), for groups of rows that are about equally many.
  template <typename Each>
  static void by_groups(int count, Each each) {
    const int groups = (count + MOST_TOGETHER - 1) / MOST_TOGETHER;
    for (int group = 0; group < groups; ++group) {
      const int first = count * group / groups;
      of_size<MOST_TOGETHER>(count * (group + 1) / groups - first, [&](auto together) { each(first, together); });
    }
  }

  template <int LARGEST, typename Each>
  static void of_size(int size, Each each) {
    if constexpr (LARGEST > 1)
      if (size < LARGEST) return of_size<LARGEST - 1>(size, each);
    each(std::integral_constant<int, LARGEST>());
  }

  // Have a block of the weight near before it is read: its rows are read side by side, which hides them from the processor.
  template <typename Number>
  void fetch(const Number* block) const {
    const char* at = (const char*)block;
    for (size_t byte = 0; byte < sizeof(Number) * LATENT_BLOCK * l.rank; byte += 64) __builtin_prefetch(at + byte);
  }

  // A query as the latent is asked: its numbers times the rows of the weight, and its rotated part.
  template <typename Number>
  void absorb(const Number* weight, int head, int first, int end) {
    const int count = end - first;
    float *query = s.desks[rank].data(), *sums = query + size_t(LATENT_ROWS) * PARTITION;
    std::fill_n(sums, size_t(count) * l.rank, 0.0f);
    for (int from = 0; from < l.nope; from += PARTITION) {
      const int size = std::min(PARTITION, l.nope - from);
      for (int row = 0; row < count; ++row) std::memcpy(query + row * PARTITION, query_of(first + row, head) + from, sizeof(float) * size);
      for (int block = 0; block < size; block += LATENT_BLOCK) {
        fetch(weight + size_t(from + block + LATENT_BLOCK) * l.rank);
        by_groups(count, [&](int row, auto together) {
          weigh_run<together.value>(query + row * PARTITION, weight + size_t(from) * l.rank, l.rank, block,
                                    std::min(block + LATENT_BLOCK, size), sums + size_t(row) * l.rank, l.rank);
        });
      }
    }
    for (int row = 0; row < count; ++row) {
      float* to = &s.absorbed[(size_t(first + row) * l.num_heads + head) * l.width()];
      std::memcpy(to, sums + size_t(row) * l.rank, sizeof(float) * l.rank);
      std::memcpy(to + l.rank, query_of(first + row, head) + l.nope, sizeof(float) * l.rope);
    }
  }

  const float* query_of(int row, int head) const { return l.queries + row * l.query_row + head * l.query_head; }

  void attend() {
    const size_t all = size_t(l.num_heads) * l.width();
    const Attention attention{s.plan, l.sight, l.entries(l.width()), l.entries(l.rank), l.num_heads, 1, l.scale, 0.0f,
                              nullptr, 0, s.absorbed.data(), all, s.attended.data(), size_t(l.num_heads) * l.rank};
    attention.run(rank, [&](int count, auto work) { team.share(operation++, count, work); });
  }

  // A head's output: the rows of its weight for values times the latent that it has attended to.
  template <typename Number>
  void expand(const Number* weight, int head, int first, int end) {
    const int count = end - first;
    float *made = s.desks[rank].data(), *latents = made + size_t(LATENT_ROWS) * PARTITION;
    weight += size_t(l.nope) * l.rank;
    for (int row = 0; row < count; ++row)
      std::memcpy(latents + size_t(row) * l.rank, &s.attended[(size_t(first + row) * l.num_heads + head) * l.rank],
                  sizeof(float) * l.rank);
    for (int from = 0; from < l.value; from += PARTITION) {
      const int size = std::min(PARTITION, l.value - from);
      for (int block = 0; block < size; block += LATENT_BLOCK) {
        fetch(weight + size_t(from + block + LATENT_BLOCK) * l.rank);
        by_groups(count, [&](int row, auto together) {
          score_run<together.value>(latents + size_t(row) * l.rank, l.rank, weight + size_t(from) * l.rank, l.rank, block,
                                    std::min(block + LATENT_BLOCK, size), made + row * PARTITION);
        });
      }
      for (int row = 0; row < count; ++row)
        std::memcpy(l.out + (size_t(first + row) * l.num_heads + head) * l.value + from, made + row * PARTITION, sizeof(float) * size);
    }
  }
};
