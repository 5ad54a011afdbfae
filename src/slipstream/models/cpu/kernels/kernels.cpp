// The C interface of Slipstream's CPU kernels; see native.py, which compiles and calls it.
#include <unistd.h>

#include <map>

#include "decoder.h"

namespace {

// One team a number of threads and process: a forked child has none of its parent's threads. Teams are never taken down:
// at exit a daemon thread may still be in the middle of a pass.
Team& team_of(int threads) {
  static std::mutex mutex;
  static auto& teams = *new std::map<std::pair<pid_t, int>, Team*>;
  std::lock_guard<std::mutex> lock(mutex);
  Team*& team = teams[{getpid(), threads}];
  if (!team) team = new Team(threads);
  return *team;
}

}  // namespace

extern "C" {

const char* slipstream_instructions() {
#if defined(__AVX512VNNI__)
  return "AVX-512 VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "generic";
#endif
}

int slipstream_padded_out(int out) { return num_units(out) * UNIT; }

int slipstream_panel() { return PANEL; }

size_t slipstream_packed_bytes(int kind, int in, int out) { return packed_bytes(kind, in, out); }

void slipstream_pack_float32(const float* weight, int in, int out, float* panels, int threads) {
  Team& team = team_of(threads);
  team.run(1, [&](int) {
    team.share(0, num_panels(out), [&](int panel) { pack_float32(weight, in, out, panel, panels); });
  });
}

void slipstream_pack_int8(const float* weight, int in, int out, int8_t* panels, float* scales, int32_t* sums,
                          int threads) {
  Team& team = team_of(threads);
  team.run(1, [&](int) {
    team.share(0, num_panels(out), [&](int panel) { pack_int8(weight, in, out, panel, panels, scales, sums); });
  });
}

// rows [n, in] -> out [n, linear.out]
void slipstream_multiply(const Linear* linear, const float* rows, int n, float* out, int threads) {
  Team& team = team_of(threads);
  int depth = padded_depth(INT8, linear->in), units = num_units(linear->out);
  std::vector<uint8_t> quantised(linear->kind == INT8 ? size_t(n) * depth : 0);
  std::vector<float> scales(linear->kind == INT8 ? n : 0);
  Rows ready{rows, size_t(linear->in), quantised.data(), scales.data()};
  team.run(2, [&](int) {
    if (linear->kind == INT8) {
      team.share(0, n, [&](int row) {
        scales[row] = quantise_row(rows + size_t(row) * linear->in, linear->in, &quantised[size_t(row) * depth]);
      });
    }
    team.share(1, units, [&](int unit) {
      multiply_unit(*linear, ready, n, unit, [&](int first, int count, const float* tile) {
        size_t width = std::min(UNIT, linear->out - unit * UNIT);
        for (int r = 0; r < count; ++r)
          std::memcpy(out + size_t(first + r) * linear->out + unit * UNIT, tile + r * UNIT, sizeof(float) * width);
      });
    });
  });
}

// out [n, linear.in] = rows `indices` [n] of the unpacked weight
void slipstream_unpack(const Linear* linear, const int64_t* indices, int n, float* out) {
  for (int i = 0; i < n; ++i) unpack_row(*linear, indices[i], out + size_t(i) * linear->in);
}

Scratch* slipstream_new_scratch() { return new Scratch; }

void slipstream_free_scratch(Scratch* scratch) { delete scratch; }

void slipstream_forward(const Model* model, const Batch* batch, Scratch* scratch, int threads) {
  Team& team = team_of(threads);
  scratch->reserve(*model, batch->num_rows, threads);
  team.run(Pass::num_operations(*model, *batch), [&](int rank) { Pass(*model, *batch, *scratch, team, rank).run(); });
}

}  // extern "C"
