// Attention over cached entries, in their logical order.
//
// A row sees a run of consecutive slots (the committed text, and the chain before it) and then single slots (its
// ancestors in a draft tree and itself). They are numbered through from the sequence's first one, and taken in partitions
// of PARTITION entries: each has its own largest score, sum of weights and weighted sum of values, which are merged in
// order. So a row's bits depend on the numbers of its entries alone: not on who reads them with it, on how its prompt was
// cut, on whether an entry is in the run or behind it, or on which thread took which partition.
//
// Rows that look at the same run are a tile: they go through a partition together, with all heads that share a key head,
// and each entry is read from memory once. Sequences that begin with the same entries are one tile too: the partitions that
// lie wholly in what they share are read from one of them, those behind it from each sequence's own slots. Scores are sums
// over `wide` lanes; values are added entry by entry.
//
// Where there are few tiles, threads share one tile's partitions, and what each partition gives is kept until it is
// merged. A long text is taken in waves of partitions, merged behind each wave, so that what is kept stays bounded.
#pragma once

#include <type_traits>
#include <vector>

#include "activations.h"
#include "entries.h"

constexpr int PARTITION = 256;  // a multiple of BLOCK
constexpr int BLOCK = 64;       // entries that stay in the nearest cache while all queries of a tile go through them
constexpr int TILE = 64;        // queries, rows times heads, that go through entries together
constexpr int MANY = 16;        // queries for which entries are widened once, into a buffer
constexpr size_t KEPT = size_t(4) << 20;  // bytes of partitions' results that are kept, for each thread

// The numbers of queries that one loop serves, and the wides of values that it adds up: what the registers hold.
constexpr int QUERIES = LANES == 16 ? 4 : 2;
constexpr int VALUES = LANES == 16 ? 4 : 2;

inline int padded(int dim) { return (dim + WIDE - 1) / WIDE * WIDE; }

// What the rows of a pass see: see Rows in models/rows.py.
struct Sight {
  const int64_t *positions, *run_begin, *run_length, *tail_begin, *tail_slots, *tail_positions;
  const int64_t *shared_begin, *shared_length;  // null where no row shares anything

  // Partitions that row `b` may read where row `a` reads them.
  int shared_partitions(int a, int b) const {
    if (!shared_begin || shared_begin[a] != shared_begin[b]) return 0;
    return int(std::min(shared_length[a], shared_length[b]) / PARTITION);
  }
};

// What one row sees in a layer, by the numbers of entries.
struct Visible {
  int64_t begin;        // the slot of entry 0
  int first, run;       // entries of the run: first .. run - 1
  const int64_t* tail;  // the slots of entries run .. end - 1, those before `first` included
  int end;

  Visible(const Sight& sight, int row, int64_t reach)
      : begin(sight.run_begin[row]), first(0), run(int(sight.run_length[row])) {
    int64_t tail_begin = sight.tail_begin[row], tail_end = sight.tail_begin[row + 1];
    tail = sight.tail_slots + tail_begin;
    end = run + int(tail_end - tail_begin);
    if (!reach) return;
    // The run holds positions 0 .. run - 1, the tail those that it says.
    int64_t oldest = reach > 0 ? sight.positions[row] - reach + 1 : sight.positions[row] / -reach * -reach;
    first = int(std::clamp<int64_t>(oldest, 0, run));
    while (first >= run && first < end && sight.tail_positions[tail_begin + first - run] < oldest) ++first;
  }

  int first_partition() const { return first / PARTITION; }
  int end_partition() const { return (end + PARTITION - 1) / PARTITION; }
};

// --- a few queries and a few entries ---------------------------------------------------------------------------------

// scores[q * PARTITION + i] = query q times key i, for Q queries and K keys.
template <int Q, int K, typename Number>
inline void score(const float* queries, int width, const Number* keys, size_t stride, float* scores) {
  wide totals[Q][K] = {};
  for (int d = 0; d < width; d += WIDE) {
    wide key[K];
    for (int k = 0; k < K; ++k) key[k] = widen_wide(keys + k * stride + d);
    for (int q = 0; q < Q; ++q) {
      wide query = load_wide(queries + q * width + d);
      for (int k = 0; k < K; ++k) totals[q][k] = fused(query, key[k], totals[q][k]);
    }
  }
  if constexpr (LANES == 16 && Q * K == 16) {
    alignas(64) float sums[16];
    store(sums, sum_lanes_of_each((const wide*)totals));
    for (int q = 0; q < Q; ++q) std::memcpy(scores + q * PARTITION, sums + q * K, sizeof(float) * K);
    return;
  }
  for (int q = 0; q < Q; ++q) {
    if constexpr (K == 4) {
      sum_each(totals[q], scores + q * PARTITION);
    } else {
      for (int k = 0; k < K; ++k) scores[q * PARTITION + k] = sum(totals[q][k]);
    }
  }
}

template <int Q, typename Number>
inline void score_run(const float* queries, int width, const Number* keys, size_t stride, int begin, int end, float* scores) {
  constexpr int K = 4;
  int i = begin;
  if constexpr (LANES == 16 && Q == 1)
    for (; i + 16 <= end; i += 16) score<1, 16>(queries, width, keys + i * stride, stride, scores + i);
  if constexpr (LANES == 16 || Q == 1)
    for (; i + K <= end; i += K) score<Q, K>(queries, width, keys + i * stride, stride, scores + i);
  for (; LANES < 16 && i + 2 <= end; i += 2) score<Q, 2>(queries, width, keys + i * stride, stride, scores + i);
  for (; i < end; ++i) score<Q, 1>(queries, width, keys + i * stride, stride, scores + i);
}

// out[q * width ..] += weights[q * PARTITION + i] * value i for the entries begin .. end - 1, for Q queries and V wides.
template <int Q, int V, typename Number>
inline void weigh(const float* weights, const Number* values, size_t stride, int begin, int end, float* out, int width) {
  wide sums[Q][V];
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) sums[q][v] = load_wide(out + q * width + v * WIDE);
  for (int i = begin; i < end; ++i) {
    wide value[V];
    for (int v = 0; v < V; ++v) value[v] = widen_wide(values + i * stride + v * WIDE);
    for (int q = 0; q < Q; ++q) {
      wide weight = splat_wide(weights[q * PARTITION + i]);
      for (int v = 0; v < V; ++v) sums[q][v] = fused(weight, value[v], sums[q][v]);
    }
  }
  for (int q = 0; q < Q; ++q)
    for (int v = 0; v < V; ++v) store(out + q * width + v * WIDE, sums[q][v]);
}

template <int Q, typename Number>
inline void weigh_run(const float* weights, const Number* values, size_t stride, int begin, int end, float* out, int width) {
  constexpr int V = Q == 1 ? 4 : VALUES;
  int d = 0;
  for (; d + V * WIDE <= width; d += V * WIDE) weigh<Q, V>(weights, values + d, stride, begin, end, out + d, width);
  for (; d < width; d += WIDE) weigh<Q, 1>(weights, values + d, stride, begin, end, out + d, width);
}

// --- one partition's result for one query, and the merging of them ---------------------------------------------------

struct Partial {
  float largest, weight;  // the largest score; the sum of exp(score - largest)
};

// The first partition is `fresh`: it is taken as it is.
inline void merge(Partial& total, float* sums, const Partial& next, const float* next_sums, int width, bool fresh) {
  if (fresh) {
    total = next;
    std::memcpy(sums, next_sums, sizeof(float) * width);
    return;
  }
  float largest = std::max(total.largest, next.largest);
  float shrunk[WIDE] = {total.largest - largest, next.largest - largest};
  store(shrunk, exp_of_negative(load_wide(shrunk)));
  total = {largest, std::fma(next.weight, shrunk[1], total.weight * shrunk[0])};
  wide kept = splat_wide(shrunk[0]), added = splat_wide(shrunk[1]);
  for (int d = 0; d < width; d += WIDE)
    store(sums + d, fused(load_wide(next_sums + d), added, load_wide(sums + d) * kept));
}

// `sink`: one more score that takes part and carries no value, or null.
inline void finish(const Partial& total, const float* sums, int dim, const float* sink, float* out) {
  float inverse = 1.0f / total.weight;
  if (sink) {
    const float largest = std::max(total.largest, *sink), shrunk = exp_of_negative(total.largest - largest);
    inverse = shrunk / std::fma(total.weight, shrunk, exp_of_negative(*sink - largest));
  }
  for (int d = 0; d < dim; ++d) out[d] = sums[d] * inverse;
}

// --- a tile ----------------------------------------------------------------------------------------------------------

// Rows first .. end - 1 see entries from the same slot on, or are of several sequences: then the first `shared` partitions
// lie from the slot `begin` on for all of them. A wave's partitions are cut into `parts` pieces.
struct Tile {
  int first, end, parts, num_partitions;
  size_t partials;  // where those of its queries begin, if there is more than one part
  int num_sequences = 1, shared = 0;
  int64_t begin = 0;

  // What a partition costs: how often it is read.
  int64_t cost(int from, int to) const {
    const int64_t own = std::max(to - std::max(from, shared), 0);
    return num_sequences == 1 ? to - from : (to - from - own) + own * num_sequences;
  }

  // Where piece `piece` of the partitions from .. to - 1 begins: pieces cost about the same.
  int cut(int from, int to, int piece) const {
    if (num_sequences == 1) return from + int64_t(to - from) * piece / parts;
    const int64_t wanted = cost(from, to) * piece / parts;
    int at = from;
    while (at < to && cost(from, at) < wanted) ++at;
    return at;
  }
};

// Room for `size` numbers; what was there is lost. Growing in place would hold both, and room for twice as many.
template <typename T>
inline void make_room(std::vector<T>& numbers, size_t size) {
  if (numbers.size() >= size) return;
  std::vector<T>().swap(numbers);
  numbers.resize(size);
}

template <typename T>
inline size_t bytes_of(const std::vector<T>& numbers) { return numbers.capacity() * sizeof(T); }

// One thread's room.
struct Desk {
  std::vector<Visible> visible;  // of the tile's rows
  std::vector<float> queries, scores, sums, totals, widened, single;
  std::vector<Partial> partials;

  // For `count` queries of up to `num_rows` rows. Threads get no memory of their own: what fails, fails before they start.
  void reserve(int num_rows, int count, int width) {
    visible.reserve(num_rows);
    for (auto* rows : {&queries, &sums, &totals}) make_room(*rows, size_t(count) * width);
    make_room(scores, size_t(count) * PARTITION);
    make_room(widened, size_t(PARTITION) * width);
    make_room(single, width);
    make_room(partials, size_t(2) * count);
  }

  size_t num_bytes() const {
    return bytes_of(visible) + bytes_of(queries) + bytes_of(scores) + bytes_of(sums) + bytes_of(totals) + bytes_of(widened) +
           bytes_of(single) + bytes_of(partials);
  }
};

// The tiles of a pass, and what its threads need: made once a pass, used in every layer of these heads.
struct AttentionPlan {
  int num_kv_heads, dim;
  bool is_made = false;             // for the pass that is computed
  std::vector<Tile> tiles;
  std::vector<int> part_begin;      // [tiles + 1]
  int wave = 1, num_waves = 1;      // partitions of a wave
  std::vector<Partial> partials;    // of split tiles: [rows, heads, 1 + wave]; the first holds what is merged so far
  std::vector<float> partial_sums;  // the same, each padded(dim) wide
  std::vector<Desk> desks;          // one a thread
  bool split = false;

  AttentionPlan(int num_kv_heads, int dim) : num_kv_heads(num_kv_heads), dim(dim) {}

  void make(const Sight& sight, int num_rows, int num_heads, int threads) {
    const int group = num_heads / num_kv_heads, most_rows = std::max(1, TILE / group);
    tiles.clear();
    tiles.reserve(num_rows);
    part_begin.reserve(num_rows + 1);
    for (int first = 0, end = 0; first < num_rows; first = end) {
      while (end < num_rows && end - first < most_rows && sight.run_begin[end] == sight.run_begin[first]) ++end;
      Tile tile{first, end, 1, 0, 0};
      join_sequences(tile, sight, num_rows, most_rows);
      end = tile.end;
      tiles.push_back(tile);
    }
    // Few tiles are cut, so that every thread has several parts to take.
    const int wanted = (PARTS_A_THREAD * threads + int(tiles.size()) * num_kv_heads - 1) / std::max(1, int(tiles.size()) * num_kv_heads);
    size_t split_rows = 0;
    int rows = 0, longest = 1;
    for (Tile& tile : tiles) {
      for (int row = tile.first; row < tile.end; ++row)
        tile.num_partitions = std::max(tile.num_partitions, Visible(sight, row, 0).end_partition());
      tile.parts = threads > 1 ? std::clamp(wanted, 1, std::max(tile.num_partitions, 1)) : 1;
      rows = std::max(rows, tile.end - tile.first);
      if (tile.parts == 1) continue;
      split_rows += tile.end - tile.first;
      longest = std::max(longest, tile.num_partitions);
    }
    split = split_rows > 0;
    cut_into_waves(longest, split_rows * num_heads * (sizeof(Partial) + sizeof(float) * padded(dim)), KEPT * threads);
    size_t num_partials = 0;
    part_begin.assign(1, 0);
    for (Tile& tile : tiles) {
      if (tile.parts > 1) {
        tile.parts = std::clamp(tile.parts, 2, std::max(wave, 2));
        tile.partials = num_partials;
        num_partials += size_t(tile.end - tile.first) * num_heads * (1 + wave);
      }
      part_begin.push_back(part_begin.back() + tile.parts * num_kv_heads);
    }
    make_room(partials, num_partials);
    make_room(partial_sums, num_partials * padded(dim));
    if (desks.size() < size_t(threads)) desks.resize(threads);
    for (Desk& desk : desks) desk.reserve(rows, rows * group, padded(dim));
    is_made = true;
  }

  int num_parts() const { return part_begin.back(); }

  // How often the threads share out work in one layer.
  int num_operations() const { return split ? 2 * num_waves : 1; }

  size_t num_bytes() const {
    size_t total = bytes_of(tiles) + bytes_of(part_begin) + bytes_of(partials) + bytes_of(partial_sums);
    for (const Desk& desk : desks) total += desk.num_bytes();
    return total;
  }

 private:
  static constexpr int PARTS_A_THREAD = 4;

  // Take the next sequences into the tile, each whole, while a partition or more is the same for all.
  static void join_sequences(Tile& tile, const Sight& sight, int num_rows, int most_rows) {
    if (!sight.shared_begin) return;
    tile.begin = sight.shared_begin[tile.first];
    for (int next = tile.end; next < num_rows && sight.run_begin[next] != sight.run_begin[next - 1]; next = tile.end) {
      int end = next;
      while (end < num_rows && sight.run_begin[end] == sight.run_begin[next]) ++end;
      const int shared = sight.shared_partitions(tile.first, next);
      if (end - tile.first > most_rows || !shared) return;
      tile.shared = tile.num_sequences == 1 ? shared : std::min(tile.shared, shared);
      tile.end = end;
      ++tile.num_sequences;
    }
  }

  // `each` bytes are kept of every partition, and as many of what is merged so far.
  void cut_into_waves(int num_partitions, size_t each, size_t most) {
    const size_t fitting = each ? most / each : size_t(num_partitions) + 1;
    const int largest = int(std::clamp<size_t>(fitting, 2, size_t(num_partitions) + 1)) - 1;
    num_waves = (num_partitions + largest - 1) / largest;
    wave = (num_partitions + num_waves - 1) / num_waves;
  }
};

// One layer's attention of all rows.
struct Attention {
  AttentionPlan& plan;
  const Sight& sight;
  Entries keys, values;
  int num_heads, num_kv_heads;
  float scale, cap;        // of scores; a cap of 0: none
  const float* sinks;      // [heads] or null
  int64_t reach;           // as in `Layer`
  const float* queries;    // row r, head h: queries + r * query_stride + h * dim
  size_t query_stride;
  float* out;  // row r, head h: out + r * out_stride + h * dim
  size_t out_stride;

  // All of it; `share(count, work)` has the threads do work(0) to work(count - 1).
  template <typename Share>
  void run(int rank, Share share) const {
    const int num_merged = int(plan.tiles.size()) * num_kv_heads;
    for (int wave = 0; wave < plan.num_waves; ++wave) {
      share(plan.num_parts(), [&](int part) { attend(part, wave, rank); });
      if (plan.split)
        share(num_merged, [&](int part) { merge_parts(part / num_kv_heads, part % num_kv_heads, wave); });
    }
  }

  // One tile and key head, over some of the tile's partitions in a wave. A tile that is not split is done in the first.
  void attend(int part, int number_of_wave, int rank) const {
    const int number = int(std::upper_bound(plan.part_begin.begin(), plan.part_begin.end(), part) - plan.part_begin.begin()) - 1;
    const Tile& tile = plan.tiles[number];
    const int own = part - plan.part_begin[number], piece = own / num_kv_heads, kv_head = own % num_kv_heads;
    const int from = tile.parts > 1 ? number_of_wave * plan.wave : 0;
    const int to = tile.parts > 1 ? std::min(from + plan.wave, tile.num_partitions) : tile.num_partitions;
    if (from >= to || (tile.parts == 1 && number_of_wave)) return;
    const int begin = tile.cut(from, to, piece), end = tile.cut(from, to, piece + 1);
    if (begin == end) return;
    Desk& desk = plan.desks[rank];
    seat(desk, tile, kv_head);
    const int group = num_heads / num_kv_heads, width = padded(values.dim), count = (tile.end - tile.first) * group;
    for (int partition = begin; partition < end; ++partition) {
      each_reading(desk, tile, partition, [&](Seats seats, int64_t slot) {
        if (!any_sees(desk, seats, partition)) return;
        switch (keys.type) {
          case ENTRY_FLOAT32: compute<float>(desk, seats, kv_head, partition, slot); break;
          case ENTRY_BFLOAT16: compute<bfloat16>(desk, seats, kv_head, partition, slot); break;
          case ENTRY_FLOAT16: compute<float16>(desk, seats, kv_head, partition, slot); break;
          case ENTRY_INT8: compute<int8_t>(desk, seats, kv_head, partition, slot); break;
        }
      });
      for (int q = 0; q < count; ++q) {
        const Visible& visible = desk.visible[q / group];
        if (partition < visible.first_partition() || partition >= visible.end_partition()) continue;
        const float* sums = &desk.sums[size_t(q) * width];
        if (tile.parts > 1) {
          const size_t place = place_of(tile, q / group, kv_head * group + q % group) + 1 + partition - from;
          plan.partials[place] = desk.partials[q];
          std::memcpy(&plan.partial_sums[place * width], sums, sizeof(float) * width);
        } else {
          merge(desk.partials[count + q], &desk.totals[size_t(q) * width], desk.partials[q], sums, width,
                partition == visible.first_partition());
        }
      }
    }
    if (tile.parts > 1) return;
    for (int q = 0; q < count; ++q)
      finish(desk.partials[count + q], &desk.totals[size_t(q) * width], tile.first + q / group, kv_head * group + q % group);
  }

  // A wave's partitions, of one key head's queries in a tile that was split.
  void merge_parts(int number, int kv_head, int number_of_wave) const {
    const Tile& tile = plan.tiles[number];
    if (tile.parts == 1) return;
    const int group = num_heads / num_kv_heads, width = padded(values.dim), from = number_of_wave * plan.wave;
    for (int row = tile.first; row < tile.end; ++row) {
      const Visible visible(sight, row, reach);
      const int begin = std::max(from, visible.first_partition()), end = std::min(from + plan.wave, visible.end_partition());
      if (begin >= end) continue;
      for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const size_t merged = place_of(tile, row - tile.first, head);
        Partial& total = plan.partials[merged];
        float* sums = &plan.partial_sums[merged * width];
        for (int partition = begin; partition < end; ++partition) {
          const size_t place = merged + 1 + partition - from;
          merge(total, sums, plan.partials[place], &plan.partial_sums[place * width], width, partition == visible.first_partition());
        }
        if (end == visible.end_partition()) finish(total, sums, row, head);
      }
    }
  }

 private:
  void finish(const Partial& total, const float* sums, int row, int head) const {
    float* to = out + row * out_stride + size_t(head) * values.dim;
    ::finish(total, sums, values.dim, sinks ? sinks + head : nullptr, to);
  }

  size_t place_of(const Tile& tile, int row, int head) const {
    return tile.partials + (size_t(row) * num_heads + head) * (1 + plan.wave);
  }

  // Rows of a tile that read a partition's entries from the same slots: first .. end - 1, counted from the tile's first.
  struct Seats {
    int first, end;
  };

  // read(rows, the slot of the partition's first entry): all rows where they share it, else sequence by sequence.
  template <typename Read>
  static void each_reading(const Desk& desk, const Tile& tile, int partition, Read read) {
    const int count = int(desk.visible.size());
    const int64_t offset = int64_t(partition) * PARTITION;
    if (tile.num_sequences > 1 && partition < tile.shared) return read(Seats{0, count}, tile.begin + offset);
    for (int first = 0, end = 0; first < count; first = end) {
      while (end < count && desk.visible[end].begin == desk.visible[first].begin) ++end;
      read(Seats{first, end}, desk.visible[first].begin + offset);
    }
  }

  static bool any_sees(const Desk& desk, Seats seats, int partition) {
    for (int row = seats.first; row < seats.end; ++row)
      if (partition >= desk.visible[row].first_partition() && partition < desk.visible[row].end_partition()) return true;
    return false;
  }

  // Copy the queries, scaled and padded with zeros.
  void seat(Desk& desk, const Tile& tile, int kv_head) const {
    const int group = num_heads / num_kv_heads, dim = keys.dim, width = padded(dim), count = (tile.end - tile.first) * group;
    desk.visible.clear();
    for (int row = tile.first; row < tile.end; ++row) desk.visible.emplace_back(sight, row, reach);
    for (int q = 0; q < count; ++q) {
      const float* from = queries + (tile.first + q / group) * query_stride + size_t(kv_head * group + q % group) * dim;
      float* to = &desk.queries[size_t(q) * width];
      for (int d = 0; d < dim; ++d) to[d] = from[d] * scale;
      std::fill(to + dim, to + width, 0.0f);
    }
  }

  // What the queries see of a partition's run, counted from the partition's first entry.
  struct Span {
    int first, end;
  };

  static Span run_of(const Visible& visible, int partition) {
    int base = partition * PARTITION;
    int first = std::clamp(visible.first - base, 0, PARTITION);
    return {first, std::max(first, std::clamp(visible.run - base, 0, PARTITION))};
  }

  // Partials and sums of these rows' queries in one partition, whose first entry lies in `slot`.
  template <typename Number>
  void compute(Desk& desk, Seats seats, int kv_head, int partition, int64_t slot) const {
    Span all{PARTITION, 0};
    for (int row = seats.first; row < seats.end; ++row) {
      Span run = run_of(desk.visible[row], partition);
      if (run.first == run.end) continue;
      all = {std::min(all.first, run.first), std::max(all.end, run.end)};
    }
    const int count = (seats.end - seats.first) * (num_heads / num_kv_heads);
    const Number *key = keys.at<Number>(kv_head, slot), *value = values.at<Number>(kv_head, slot);
    const bool fills_vectors = keys.dim % WIDE == 0 && values.dim % WIDE == 0;
    if (fills_vectors && (count < MANY || std::is_same_v<Number, float>)) {
      score_all(desk, seats, partition, all, key, keys.step());
      make_weights(desk, seats, partition, kv_head, slot);
      weigh_all(desk, seats, partition, all, kv_head, value, values.step());
    } else {
      const float* widened = desk.widened.data();
      widen_all(keys, key, all, desk.widened);
      score_all(desk, seats, partition, all, widened, padded(keys.dim));
      make_weights(desk, seats, partition, kv_head, slot);
      if (value != key) widen_all(values, value, all, desk.widened);
      weigh_all(desk, seats, partition, all, kv_head, widened, padded(value == key ? keys.dim : values.dim));
    }
  }

  // [PARTITION, padded dim] float32
  template <typename Number>
  static void widen_all(const Entries& entries, const Number* from, Span all, std::vector<float>& to) {
    const int width = padded(entries.dim);
    for (int i = all.first; i < all.end; ++i) widen_one(from + i * entries.step(), entries.dim, &to[size_t(i) * width]);
  }

  template <typename Number>
  static void widen_one(const Number* from, int dim, float* to) {
    const int width = padded(dim);
    int d = 0;
    for (; d + WIDE <= dim; d += WIDE) store(to + d, widen_wide(from + d));
    if (d == width) return;
    Number last[WIDE] = {};
    std::memcpy(last, from + d, sizeof(Number) * (dim - d));
    store(to + d, widen_wide(last));
  }

  // The scores of a partition's run.
  template <typename Number>
  void score_all(Desk& desk, Seats seats, int partition, Span all, const Number* key, size_t stride) const {
    const int width = padded(keys.dim), group = num_heads / num_kv_heads, last = seats.end * group;
    for (int block = all.first; block < all.end; block = (block / BLOCK + 1) * BLOCK) {
      const int end = std::min(all.end, (block / BLOCK + 1) * BLOCK);
      for (int q = seats.first * group; q < last;) {
        const int together = std::min(QUERIES, last - q);
        Span span{PARTITION, 0};  // what any of them sees
        for (int row = q / group; row <= (q + together - 1) / group; ++row) {
          Span run = run_of(desk.visible[row], partition);
          if (run.first < run.end) span = {std::min(span.first, run.first), std::max(span.end, run.end)};
        }
        span = {std::max(span.first, block), std::min(span.end, end)};
        const float* query = &desk.queries[size_t(q) * width];
        float* scores = &desk.scores[size_t(q) * PARTITION];
        if (together == QUERIES) {
          score_run<QUERIES>(query, width, key, stride, span.first, span.end, scores);
          q += QUERIES;
        } else {
          score_run<1>(query, width, key, stride, span.first, span.end, scores);
          ++q;
        }
      }
    }
  }

  // Scores become weights, partials are filled in.
  void make_weights(Desk& desk, Seats seats, int partition, int kv_head, int64_t slot) const {
    const int width = padded(keys.dim), group = num_heads / num_kv_heads;
    const float* key_scales = keys.type == ENTRY_INT8 ? &keys.scale(kv_head, slot) : nullptr;
    const float* value_scales = keys.type == ENTRY_INT8 ? &values.scale(kv_head, slot) : nullptr;
    for (int q = seats.first * group; q < seats.end * group; ++q) {
      const Visible& visible = desk.visible[q / group];
      float* scores = &desk.scores[size_t(q) * PARTITION];
      const Span run = run_of(visible, partition);
      if (key_scales)
        for (int i = run.first; i < run.end; ++i) scores[i] *= key_scales[i];
      each_single(visible, partition, [&](int i, int64_t single) {
        score_single(desk, &desk.queries[size_t(q) * width], kv_head, single, scores + i);
      });
      desk.partials[q] = exponentiate(visible, partition, scores, cap);
      if (!value_scales) continue;
      for (int i = run.first; i < run.end; ++i) scores[i] *= value_scales[i];
      each_single(visible, partition, [&](int i, int64_t single) { scores[i] *= values.scale(kv_head, single); });
    }
  }

  template <typename Number>
  void weigh_all(Desk& desk, Seats seats, int partition, Span all, int kv_head, const Number* value, size_t stride) const {
    const int width = padded(values.dim), group = num_heads / num_kv_heads, first = seats.first * group, last = seats.end * group;
    std::fill(&desk.sums[size_t(first) * width], &desk.sums[size_t(first) * width] + size_t(last - first) * width, 0.0f);
    for (int block = all.first; block < all.end; block = (block / BLOCK + 1) * BLOCK) {
      const int end = std::min(all.end, (block / BLOCK + 1) * BLOCK);
      for (int q = first; q < last;) {
        const int together = std::min(QUERIES, last - q);
        const float* weights = &desk.scores[size_t(q) * PARTITION];
        float* sums = &desk.sums[size_t(q) * width];
        Span common{block, end};  // what all of them see
        for (int i = q; i < q + together; ++i) {
          Span run = run_of(desk.visible[i / group], partition);
          common = {std::max(common.first, run.first), std::min(common.end, run.end)};
        }
        const bool shared = together == QUERIES && common.first < common.end;
        auto each = [&](auto part) {
          for (int i = 0; i < together; ++i) {
            Span run = run_of(desk.visible[(q + i) / group], partition);
            Span own = part(Span{std::max(run.first, block), std::min(run.end, end)});
            weigh_run<1>(weights + i * PARTITION, value, stride, own.first, own.end, sums + i * width, width);
          }
        };
        if (shared) {
          each([&](Span own) { return Span{own.first, common.first}; });
          weigh_run<QUERIES>(weights, value, stride, common.first, common.end, sums, width);
          each([&](Span own) { return Span{common.end, own.end}; });
        } else {
          each([](Span own) { return own; });
        }
        q += together;
      }
    }
    for (int q = first; q < last; ++q)
      each_single(desk.visible[q / group], partition, [&](int i, int64_t single) {
        weigh_single(desk, desk.scores[size_t(q) * PARTITION + i], kv_head, single, &desk.sums[size_t(q) * width]);
      });
  }

  // The visible single entries of a partition: take(number in the partition, slot).
  template <typename Take>
  static void each_single(const Visible& visible, int partition, Take take) {
    const int base = partition * PARTITION;
    const int begin = std::max({visible.run, visible.first, base}), end = std::min(visible.end, base + PARTITION);
    for (int entry = begin; entry < end; ++entry) take(entry - base, visible.tail[entry - visible.run]);
  }

  void score_single(Desk& desk, const float* query, int kv_head, int64_t single, float* to) const {
    with_single(desk, keys, kv_head, single, [&](const float* key) { score<1, 1>(query, padded(keys.dim), key, 0, to); });
    if (keys.type == ENTRY_INT8) *to *= keys.scale(kv_head, single);
  }

  void weigh_single(Desk& desk, float weight, int kv_head, int64_t single, float* sums) const {
    with_single(desk, values, kv_head, single, [&](const float* value) {
      weigh_run<1>(&weight, value, 0, 0, 1, sums, padded(values.dim));
    });
  }

  template <typename Use>
  void with_single(Desk& desk, const Entries& entries, int kv_head, int64_t single, Use use) const {
    float* to = desk.single.data();
    switch (keys.type) {
      case ENTRY_FLOAT32: widen_one(entries.at<float>(kv_head, single), entries.dim, to); break;
      case ENTRY_BFLOAT16: widen_one(entries.at<bfloat16>(kv_head, single), entries.dim, to); break;
      case ENTRY_FLOAT16: widen_one(entries.at<float16>(kv_head, single), entries.dim, to); break;
      case ENTRY_INT8: widen_one(entries.at<int8_t>(kv_head, single), entries.dim, to); break;
    }
    use(to);
  }

  // Scores of what the query sees -> weights, relative to the largest.
  static Partial exponentiate(const Visible& visible, int partition, float* scores, float cap) {
    const int base = partition * PARTITION;
    const int first = std::clamp(visible.first - base, 0, PARTITION), end = std::clamp(visible.end - base, 0, PARTITION);
    if (first >= end) return {-INFINITY, 0.0f};
    const int begin = first / WIDE * WIDE, rounded = padded(end);
    if (cap)
      for (int i = begin; i < rounded; i += WIDE) store(scores + i, capped(load_wide(scores + i), cap));
    std::fill(scores + begin, scores + first, -INFINITY);
    std::fill(scores + end, scores + rounded, -INFINITY);
    wide best = load_wide(scores + begin);
    for (int i = begin + WIDE; i < rounded; i += WIDE) best = larger(load_wide(scores + i), best);
    const float largest = largest_lane(best);
    wide total = {};
    for (int i = begin; i < rounded; i += WIDE) {
      wide weights = exp_of_negative(load_wide(scores + i) - splat_wide(largest));
      store(scores + i, weights);
      total = total + weights;
    }
    return {largest, sum(total)};
  }
};

// --- one layer of a model whose other operations are not ours -------------------------------------------------------

// What a pass's layers compute with, one after the other.
struct AttentionScratch {
  AttentionPlan plan{1, 0};

  void reserve(const Sight& sight, int num_rows, int num_heads, int num_kv_heads, int width, int threads) {
    plan.num_kv_heads = num_kv_heads;
    plan.dim = width;
    plan.make(sight, num_rows, num_heads, threads);
  }

  size_t num_bytes() const { return plan.num_bytes(); }
};

// A layer whose rows' entries are in the cache already.
struct LayerAttention {
  int32_t num_rows, num_heads, num_kv_heads;
  int32_t key_dim, value_dim, value_step;  // numbers from one value to the next
  int32_t entry_type, unused;
  float scale, cap;  // as in `Attention`
  int64_t reach, num_slots;
  const float *queries, *sinks;  // [rows, heads, key_dim]; [heads] or null
  void *keys, *values;           // [kv_heads, num_slots, ...]
  float *key_scales, *value_scales;
  float* out;  // [rows, heads, value_dim]
  Sight sight;

  Attention with(AttentionPlan& plan) const {
    return {plan,   sight,
            Entries{entry_type, key_dim, num_slots, keys, key_scales},
            Entries{entry_type, value_dim, num_slots, values, value_scales, value_step},
            num_heads, num_kv_heads, scale, cap, sinks, reach,
            queries, size_t(num_heads) * key_dim, out, size_t(num_heads) * value_dim};
  }
};
