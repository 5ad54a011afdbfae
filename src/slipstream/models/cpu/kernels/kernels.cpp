// The C interface of Slipstream's CPU kernels; see native.py, which compiles and calls it.
#include <unistd.h>

#include <map>

#include "chain.h"
#include "eagle.h"
#include "heads.h"

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

void run_pass(const Model& model, const Batch& batch, Scratch& scratch, int threads) {
  Team& team = team_of(threads);
  scratch.reserve(model, batch.num_rows);
  scratch.plan_attention(model, batch, threads);
  team.run(Pass::num_operations(model, batch), [&](int rank) { Pass(model, batch, scratch, team, rank).run(); });
}

void run_eagle(const Eagle& eagle, const Batch& batch, const States& states, Scratch& scratch, int threads) {
  Team& team = team_of(threads);
  scratch.reserve(eagle.model, batch.num_rows, EaglePass::widest_input(eagle));
  scratch.plan_attention(eagle.model, batch, threads);
  team.run(Pass::num_operations(eagle.model, batch),
           [&](int rank) { EaglePass(eagle, batch, states, scratch, team, rank).run(); });
}

void run_heads(const Heads& heads, const HeadRows& rows, Scratch& scratch, int threads) {
  Team& team = team_of(threads);
  HeadsPass::reserve(heads, rows, scratch);
  team.run(HeadsPass::num_operations(heads, rows), [&](int rank) { HeadsPass(heads, rows, scratch, team, rank).run(); });
}

template <typename Weights>
void pack(const typename Weights::Stored* weight, int in, int out, typename Weights::Stored* panels, int threads) {
  Team& team = team_of(threads);
  team.run(1, [&](int) {
    team.share(0, num_panels(out), [&](int panel) { pack_floats<Weights>(weight, in, out, panel, panels); });
  });
}

}  // namespace

extern "C" {

const char* slipstream_instructions() {
#if defined(SLIPSTREAM_TILES)
  return tiles_permitted() ? "AMX" : "AVX-512 VNNI; the system refuses AMX";
#elif defined(__AVX512VNNI__)
  return "AVX-512 VNNI";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVXVNNI__)
  return "AVX2 VNNI";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON dot products";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "generic";
#endif
}

int slipstream_padded_out(int out) { return num_units(out) * UNIT; }

int slipstream_panel() { return PANEL; }

size_t slipstream_packed_bytes(int kind, int in, int out) { return packed_bytes(kind, in, out); }

void slipstream_pack_float32(const float* weight, int in, int out, float* panels, int threads) {
  pack<Float32Weights>(weight, in, out, panels, threads);
}

void slipstream_pack_bfloat16(const bfloat16* weight, int in, int out, bfloat16* panels, int threads) {
  pack<Bfloat16Weights>(weight, in, out, panels, threads);
}

void slipstream_pack_float16(const float16* weight, int in, int out, float16* panels, int threads) {
  pack<Float16Weights>(weight, in, out, panels, threads);
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
  run_pass(*model, *batch, *scratch, threads);
}

void slipstream_draft(const Model* model, const Batch* batch, const Chains* chains, Scratch* scratch, int threads) {
  draft(*batch, model->vocab, *chains,
        [&](const Batch& level, const std::vector<int64_t>&) { run_pass(*model, level, *scratch, threads); });
}

void slipstream_eagle(const Eagle* eagle, const Batch* batch, const States* states, Scratch* scratch, int threads) {
  run_eagle(*eagle, *batch, *states, *scratch, threads);
}

void slipstream_draft_eagle(const Eagle* eagle, const Batch* batch, const States* states, const Chains* chains,
                            Scratch* scratch, int threads) {
  const size_t hidden = eagle->model.hidden;
  std::vector<float> given;
  States level_states = *states;
  draft(*batch, eagle->model.vocab, *chains, [&](const Batch& level, const std::vector<int64_t>& above) {
    if (!above.empty()) {
      given.resize(above.size() * hidden);
      for (size_t i = 0; i < above.size(); ++i)
        std::memcpy(&given[i * hidden], states->made + above[i] * hidden, sizeof(float) * hidden);
      level_states = {given.data(), states->made, false};
    }
    run_eagle(*eagle, level, level_states, *scratch, threads);
  });
}

void slipstream_heads(const Heads* heads, const HeadRows* rows, Scratch* scratch, int threads) {
  run_heads(*heads, *rows, *scratch, threads);
}

// Medusa: all levels' logits come from one pass over the states [n, hidden] that `rows` has.
void slipstream_draft_medusa(const Heads* heads, const HeadRows* rows, const Chains* chains, Scratch* scratch, int threads) {
  run_heads(*heads, *rows, *scratch, threads);
  for (int chain = 0; chain < rows->n; ++chain)
    for (int level = 0; level < chains->lengths[chain]; ++level) {
      const float* logits = rows->logits + (size_t(level) * rows->n + chain) * heads->vocab;
      if (choose(*chains, chain, level, logits) < 0) break;
    }
}

// Hydra: each level reads what the last one read and the embedding of the token behind it. `states` [n, hidden] belong to
// the rows of the batch, which holds the tokens behind them.
void slipstream_draft_hydra(const Heads* heads, const Model* embedder, const Batch* batch, const float* states,
                            const Chains* chains, Scratch* scratch, int threads) {
  const int hidden = heads->hidden;
  std::vector<float> last(states, states + size_t(batch->num_rows) * hidden), next;
  int width = hidden, number = 0;
  draft(*batch, heads->vocab, *chains, [&](const Batch& level, const std::vector<int64_t>& above) {
    next.resize(size_t(level.num_rows) * (width + hidden));
    for (int row = 0; row < level.num_rows; ++row) {
      float* to = &next[size_t(row) * (width + hidden)];
      std::memcpy(to, &last[size_t(above.empty() ? row : above[row]) * width], sizeof(float) * width);
      embed(*embedder, level.token_ids[row], to + width);
    }
    last.swap(next);
    width += hidden;
    run_heads(*heads, {level.num_rows, number++, 1, 0, last.data(), level.logits}, *scratch, threads);
  });
}

}  // extern "C"
