// int8 products by AMX's tiles and by vectors: the same bits over odd shapes and 1 to 64 rows. Weights and rows end where
// memory does, so that reading on ends the program.
//
// usage: tiles SEED NUM_CASES; prints how many products of tiles there were, and exits 1 at the first that differs.
#include <sys/mman.h>

#include <memory>
#include <random>

#include "linear.h"

namespace {

std::mt19937_64 generator;

int between(int low, int high) { return low + int(generator() % uint64_t(high - low + 1)); }

float number() { return float(between(-1000, 1000)) / float(between(1, 300)); }

template <typename T>
std::unique_ptr<T[]> block(size_t size) {
  return std::unique_ptr<T[]>(new T[size]());
}

// Zeros before a page that nobody may read.
struct Guarded {
  static constexpr size_t PAGE = 4096;
  size_t mapped;
  uint8_t *memory, *begin;

  explicit Guarded(size_t size) : mapped((size + PAGE - 1) / PAGE * PAGE + PAGE) {
    memory = (uint8_t*)mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(memory + mapped - PAGE, PAGE, PROT_NONE);
    begin = memory + mapped - PAGE - size;
  }
  ~Guarded() { munmap(memory, mapped); }
};

bool case_is_equal(int n, int in, int out) {
  const size_t depth = padded_depth(INT8, in), padded = size_t(num_units(out)) * UNIT;
  auto weight = block<float>(size_t(out) * in), scales = block<float>(padded), bias = block<float>(padded);
  const Guarded packed(packed_bytes(INT8, in, out)), quantised(n * depth);
  int8_t* panels = (int8_t*)packed.begin;
  auto sums = block<int32_t>(padded);
  for (size_t i = 0; i < size_t(out) * in; ++i) weight[i] = number();
  for (int i = 0; i < out; ++i) bias[i] = number();
  for (int panel = 0; panel < num_panels(out); ++panel)
    pack_int8(weight.get(), in, out, panel, panels, scales.get(), sums.get());
  const Linear linear{INT8, in, out, 0, panels, scales.get(), sums.get(), between(0, 1) ? bias.get() : nullptr};

  auto row = block<float>(in), row_scales = block<float>(n);
  const bool extreme = between(0, 3) == 0;  // all integers 127 or -127
  for (int r = 0; r < n; ++r) {
    for (int k = 0; k < in; ++k) row[k] = extreme ? (r % 2 ? -1.0f : 1.0f) : number();
    if (between(0, 20) == 0) row[0] = NAN;
    row_scales[r] = quantise_row(row.get(), in, quantised.begin + r * depth);
  }
  const Rows rows{nullptr, 0, quantised.begin, row_scales.get()};
  for (int unit = 0; unit < num_units(out); ++unit) {
    auto by_tiles = block<float>(size_t(n) * UNIT), by_vectors = block<float>(size_t(n) * UNIT);
    auto keep = [](float* to) {
      return [to](int first, int count, const float* tile) { std::memcpy(to + first * UNIT, tile, sizeof(float) * count * UNIT); };
    };
    multiply_unit(linear, rows, n, unit, keep(by_tiles.get()));
    multiply_unit_by_vectors(linear, rows, n, unit, keep(by_vectors.get()));
    if (std::memcmp(by_tiles.get(), by_vectors.get(), sizeof(float) * n * UNIT)) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(std::strtoull(arguments[1], nullptr, 10));
  const int num_cases = std::atoi(arguments[2]);
  for (int i = 0; i < num_cases; ++i) {
    const int n = i < 64 ? i + 1 : between(1, 64), in = between(1, 200), out = between(1, 200);
    if (case_is_equal(n, in, out)) continue;
    std::printf("%d rows of %d inputs and %d outputs have other bits by tiles\n", n, in, out);
    return 1;
  }
  std::printf("%ld\n", emulated::num_products.load());
}
