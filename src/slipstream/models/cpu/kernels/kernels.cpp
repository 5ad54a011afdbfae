// The C interface of Slipstream's CPU kernels; see native.py, which compiles and calls it.
#include <unistd.h>

#include <map>
#include <new>
#include <stdexcept>

#include "chain.h"
#include "eagle.h"
#include "fitting.h"
#include "heads.h"
#include "latent.h"
#include "recurrent.h"
#include "wanted.h"

// What the functions return that may lack memory; see native.py.
enum Status : int { DONE = 0, OUT_OF_MEMORY = 1 };

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

// A row's logits may be wanted twice.
size_t most_rows(const Batch& batch) { return std::max(batch.num_rows, batch.num_logit_rows); }

void run_part(const Model& model, const Batch& batch, Scratch& scratch, Team& team, Pass::Part part) {
  scratch.divide(model, batch, team.size());
  scratch.plan_attention(model, batch, team.size());
  team.run(Pass::num_operations(model, batch, scratch), [&](int rank) { Pass(model, batch, scratch, team, rank).run(part); });
}

void run_pass(const Model& model, const Batch& batch, Scratch& scratch, int threads) {
  Team& team = team_of(threads);
  const int copies = Pass::num_copies(model, batch, team.size()), num_common = num_common_layers(model, batch);
  scratch.reserve(model, most_rows(batch), quantises(model), 0, copies);
  if (batch.best) scratch.begin_best(model, batch.num_logit_rows, team.size());
  if (num_common == batch.num_layers || batch.num_logit_rows == batch.num_rows)
    return run_part(model, batch, scratch, team, Pass::WHOLE);
  Batch common = batch;
  common.num_layers = num_common;
  run_part(model, common, scratch, team, Pass::BEGINNING);
  if (!batch.num_logit_rows) return;
  const WantedRows wanted(batch, num_common);
  wanted.take(model, scratch);
  run_part(model, wanted.batch, scratch, team, Pass::END);
}

void run_attention(const LayerAttention& layer, AttentionScratch& scratch, int threads) {
  Team& team = team_of(threads);
  const int widest = std::max(layer.key_dim, layer.value_dim);
  scratch.reserve(layer.sight, layer.num_rows, layer.num_heads, layer.num_kv_heads, widest, team.size());
  const Attention attention = layer.with(scratch.plan);
  team.run(scratch.plan.num_operations(), [&](int rank) {
    int operation = 0;
    attention.run(rank, [&](int count, auto work) { team.share(operation++, count, work); });
  });
}

void run_latent(const Latent& latent, LatentScratch& scratch, int threads) {
  Team& team = team_of(threads);
  scratch.reserve(latent, team.size());
  team.run(LatentPass::num_operations(scratch), [&](int rank) { LatentPass(latent, scratch, team, rank).run(); });
}

void run_eagle(const Eagle& eagle, const Batch& batch, const States& states, Scratch& scratch, int threads) {
  Team& team = team_of(threads);
  scratch.reserve(eagle.model, most_rows(batch), EaglePass::quantises_rows(eagle), EaglePass::widest_input(eagle),
                  Pass::num_copies(eagle.model, batch, team.size()));
  scratch.divide(eagle.model, batch, team.size());
  scratch.plan_attention(eagle.model, batch, team.size());
  team.run(Pass::num_operations(eagle.model, batch, scratch),
           [&](int rank) { EaglePass(eagle, batch, states, scratch, team, rank).run(); });
}

void run_heads(const Heads& heads, const HeadRows& rows, Scratch& scratch, int threads) {
  Team& team = team_of(threads);
  HeadsPass::reserve(heads, rows, scratch);
  team.run(HeadsPass::num_operations(heads, rows), [&](int rank) { HeadsPass(heads, rows, scratch, team, rank).run(); });
}

template <typename WalkPass, typename Given>
void run_walk(const Walk& walk, const Given& given, int threads) {
  Team& team = team_of(threads);
  WalkPass pass(walk, given, team.size());
  team.run(1, [&](int rank) { team.share(0, pass.num_parts(), [&](int part) { pass.run(part, rank); }); });
}

void draft_eagle(const Eagle& eagle, const Batch& batch, const States& states, const Chains& chains, Scratch& scratch,
                 int threads) {
  const size_t hidden = eagle.model.hidden;
  std::vector<float> given;
  States level_states = states;
  draft(batch, eagle.model.vocab, chains, [&](const Batch& level, const std::vector<int64_t>& above) {
    if (!above.empty()) {
      given.resize(above.size() * hidden);
      for (size_t i = 0; i < above.size(); ++i)
        std::memcpy(&given[i * hidden], states.made + above[i] * hidden, sizeof(float) * hidden);
      level_states = {given.data(), states.made, false};
    }
    run_eagle(eagle, level, level_states, scratch, threads);
  });
}

void draft_medusa(const Heads& heads, const HeadRows& rows, const Chains& chains, Scratch& scratch, int threads) {
  run_heads(heads, rows, scratch, threads);
  for (int chain = 0; chain < rows.n; ++chain)
    for (int level = 0; level < chains.lengths[chain]; ++level) {
      const float* logits = rows.logits + (size_t(level) * rows.n + chain) * heads.vocab;
      if (choose(chains, chain, level, logits) < 0) break;
    }
}

// Each level reads what the last one read and the embedding of the token behind it.
void draft_hydra(const Heads& heads, const Model& embedder, const Batch& batch, const float* states, const Chains& chains,
                 Scratch& scratch, int threads) {
  const int hidden = heads.hidden;
  std::vector<float> last(states, states + size_t(batch.num_rows) * hidden), next;
  int width = hidden, number = 0;
  draft(batch, heads.vocab, chains, [&](const Batch& level, const std::vector<int64_t>& above) {
    next.resize(size_t(level.num_rows) * (width + hidden));
    for (int row = 0; row < level.num_rows; ++row) {
      float* to = &next[size_t(row) * (width + hidden)];
      std::memcpy(to, &last[size_t(above.empty() ? row : above[row]) * width], sizeof(float) * width);
      embed(embedder, level.token_ids[row], to + width);
    }
    last.swap(next);
    width += hidden;
    run_heads(heads, {level.num_rows, number++, 1, 0, last.data(), level.logits}, scratch, threads);
  });
}

// No exception may leave the library. What is had, is had by the calling thread before the others start.
template <typename Work>
Status status_of(Work work) {
  try {
    work();
    return DONE;
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {  // more than a vector may hold
  }
  return OUT_OF_MEMORY;
}

template <typename Weights>
Status pack(const typename Weights::Stored* weight, int in, int out, typename Weights::Stored* panels, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    team.run(1, [&](int) {
      team.share(0, num_panels(out), [&](int panel) { pack_floats<Weights>(weight, in, out, panel, panels); });
    });
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

int slipstream_has_bfloat16_tiles() { return has_bfloat16_tiles(); }

int slipstream_padded_out(int out) { return num_units(out) * UNIT; }

int slipstream_panel() { return PANEL; }

// `group` is the inputs of one, of the kinds that have groups.
size_t slipstream_packed_bytes(int kind, int in, int out, int group) { return packed_bytes(kind, in, out, group); }

Status slipstream_pack_float32(const float* weight, int in, int out, float* panels, int threads) {
  return pack<Float32Weights>(weight, in, out, panels, threads);
}

Status slipstream_pack_bfloat16(const bfloat16* weight, int in, int out, bfloat16* panels, int threads) {
  return pack<Bfloat16Weights>(weight, in, out, panels, threads);
}

Status slipstream_pack_float16(const float16* weight, int in, int out, float16* panels, int threads) {
  return pack<Float16Weights>(weight, in, out, panels, threads);
}

// Codes [out, in] of `kind`, which has groups, scales and, where the kind has them, zeros [out, groups].
Status slipstream_pack_groups(int kind, int group, const uint8_t* codes, const float* scales, const float* zeros, int in, int out,
                              uint8_t* panels, float* factors, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    team.run(1, [&](int) {
      team.share(0, num_panels(out), [&](int panel) {
        of_groups(kind, [&]<typename Codes, bool ZEROS>() {
          pack_groups<Codes, ZEROS>(codes, scales, zeros, in, out, group, panel, panels, factors);
        });
      });
    });
  });
}

// weight [out, in] -> codes from 0 to 15 [out, in], scales and zeros [out, groups]; without `has_zeros` each zero is 8.
Status slipstream_fit_groups(const float* weight, int in, int out, int group, int has_zeros, uint8_t* codes, float* scales,
                             float* zeros, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    const size_t groups = num_groups(in, group);
    team.run(1, [&](int) {
      team.share(0, out, [&](int row) {
        fit_output(weight + size_t(row) * in, in, group, has_zeros, codes + size_t(row) * in, scales + row * groups,
                   zeros + row * groups);
      });
    });
  });
}

// weight [out, in] -> codes from 1 to 255 [out, in], whose zeros are 128, and scales [out, groups].
Status slipstream_round_groups(const float* weight, int in, int out, int group, uint8_t* codes, float* scales, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    const size_t groups = num_groups(in, group);
    team.run(1, [&](int) {
      team.share(0, out, [&](int row) {
        round_output(weight + size_t(row) * in, in, group, codes + size_t(row) * in, scales + row * groups);
      });
    });
  });
}

// weight [out, in] of floats, as FOUR_BITS_BLOCKS.
Status slipstream_fit_blocks(const float* weight, int in, int out, uint8_t* panels, float* factors, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    std::vector<CodedBlock> room(size_t(team.size()) * num_blocks(in));
    team.run(1, [&](int rank) {
      team.share(0, num_panels(out), [&](int panel) {
        pack_blocks(in, out, panel, panels, factors, &room[size_t(rank) * num_blocks(in)], [&](int row, int block) {
          return fit_block(weight + size_t(row) * in + block * BLOCK_INPUTS, std::min(BLOCK_INPUTS, in - block * BLOCK_INPUTS));
        });
      });
    });
  });
}

// codes [out, in] from 0 to 15, the groups' scales and minimums [out, groups], the blocks' [out, blocks].
Status slipstream_pack_blocks(const uint8_t* codes, const uint8_t* group_scales, const int8_t* group_minimums, const float* scales,
                              const float* minimums, int in, int out, uint8_t* panels, float* factors, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    const size_t groups = num_groups(in, BLOCK_GROUP), blocks = num_blocks(in);
    std::vector<CodedBlock> room(team.size() * blocks);
    team.run(1, [&](int rank) {
      team.share(0, num_panels(out), [&](int panel) {
        pack_blocks(in, out, panel, panels, factors, &room[rank * blocks], [&](int row, int b) {
          CodedBlock block{scales[row * blocks + b], minimums[row * blocks + b], {}, {}, {}};
          const int first = b * BLOCK_GROUPS;
          std::copy_n(group_scales + row * groups + first, groups_in_block(in, b), block.scales);
          std::copy_n(group_minimums + row * groups + first, groups_in_block(in, b), block.minimums);
          std::copy_n(codes + size_t(row) * in + b * BLOCK_INPUTS, std::min(BLOCK_INPUTS, in - b * BLOCK_INPUTS), block.codes);
          return block;
        });
      });
    });
  });
}

// rows [n, in] -> out [n, linear.out]
Status slipstream_multiply(const Linear* linear, const float* rows, int n, float* out, int threads) {
  return status_of([&] {
    Team& team = team_of(threads);
    const int units = num_units(linear->out);
    const size_t row_bytes = quantised_bytes(*linear);
    std::vector<uint8_t> quantised(n * row_bytes);
    const LowRank* change = linear->change;
    std::vector<float> lowered(change ? size_t(n) * change->rank : 0);
    Rows ready{rows, size_t(linear->in), quantised.data(), lowered.data()};
    team.run(2, [&](int) {
      if (quantises(*linear) || change) {
        team.share(0, n, [&](int row) {
          const float* from = rows + size_t(row) * linear->in;
          if (quantises(*linear)) quantise(*linear, from, &quantised[row * row_bytes]);
          if (change) lower(*change, from, &lowered[size_t(row) * change->rank]);
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
  });
}

// out [n, linear.in] = rows `indices` [n] of the unpacked weight
void slipstream_unpack(const Linear* linear, const int64_t* indices, int n, float* out) {
  for (int i = 0; i < n; ++i) unpack_row(*linear, indices[i], out + size_t(i) * linear->in);
}

// Null where there is no memory.
Scratch* slipstream_new_scratch() { return new (std::nothrow) Scratch; }

void slipstream_free_scratch(Scratch* scratch) { delete scratch; }

// What passes have taken so far, for the largest of them.
size_t slipstream_scratch_bytes(const Scratch* scratch) { return scratch->num_bytes(); }

Status slipstream_forward(const Model* model, const Batch* batch, Scratch* scratch, int threads) {
  return status_of([&] { run_pass(*model, *batch, *scratch, threads); });
}

// As slipstream_forward; `nanoseconds` [threads, layers + 1, NUM_PASS_PARTS, 2] = what each thread has taken, see PartTimes.
Status slipstream_forward_by_part(const Model* model, const Batch* batch, int64_t* nanoseconds, Scratch* scratch, int threads) {
  const Status status = status_of([&] {
    scratch->times.assign(threads, PartTimes(model->num_layers));
    run_pass(*model, *batch, *scratch, threads);
    for (const PartTimes& times : scratch->times)
      nanoseconds = std::copy(times.nanoseconds.begin(), times.nanoseconds.end(), nanoseconds);
  });
  scratch->times.clear();
  return status;
}

Status slipstream_draft(const Model* model, const Batch* batch, const Chains* chains, Scratch* scratch, int threads) {
  return status_of([&] {
    draft(*batch, model->vocab, *chains,
          [&](const Batch& level, const std::vector<int64_t>&) { run_pass(*model, level, *scratch, threads); });
  });
}

// Null where there is no memory.
LatentScratch* slipstream_new_layer_scratch() { return new (std::nothrow) LatentScratch; }

void slipstream_free_layer_scratch(LatentScratch* scratch) { delete scratch; }

size_t slipstream_layer_scratch_bytes(const LatentScratch* scratch) { return scratch->num_bytes(); }

// One layer's attention of all rows, whose entries are stored.
Status slipstream_attend(const LayerAttention* layer, LatentScratch* scratch, int threads) {
  return status_of([&] { run_attention(*layer, *scratch, threads); });
}

// One layer's latent attention of all rows, which it stores.
Status slipstream_latent(const Latent* latent, LatentScratch* scratch, int threads) {
  return status_of([&] { run_latent(*latent, *scratch, threads); });
}

Status slipstream_eagle(const Eagle* eagle, const Batch* batch, const States* states, Scratch* scratch, int threads) {
  return status_of([&] { run_eagle(*eagle, *batch, *states, *scratch, threads); });
}

Status slipstream_draft_eagle(const Eagle* eagle, const Batch* batch, const States* states, const Chains* chains,
                              Scratch* scratch, int threads) {
  return status_of([&] { draft_eagle(*eagle, *batch, *states, *chains, *scratch, threads); });
}

Status slipstream_heads(const Heads* heads, const HeadRows* rows, Scratch* scratch, int threads) {
  return status_of([&] { run_heads(*heads, *rows, *scratch, threads); });
}

// Medusa: all levels' logits come from one pass over the states [n, hidden] that `rows` has.
Status slipstream_draft_medusa(const Heads* heads, const HeadRows* rows, const Chains* chains, Scratch* scratch, int threads) {
  return status_of([&] { draft_medusa(*heads, *rows, *chains, *scratch, threads); });
}

Status slipstream_outer_products(const Walk* walk, const OuterProducts* products, int threads) {
  return status_of([&] { run_walk<OuterProductsPass>(*walk, *products, threads); });
}

Status slipstream_convolve(const Walk* walk, const Convolution* convolution, int threads) {
  return status_of([&] { run_walk<ConvolutionPass>(*walk, *convolution, threads); });
}

// Chains of which all logits are there.
Status slipstream_draw_levels(const Chains* chains, int num_chains, const Levels* levels) {
  return status_of([&] { draw_levels(*chains, num_chains, *levels); });
}

// One level of chains whose next logits depend on what is drawn.
Status slipstream_draw_level(const Chains* chains, int level, const int64_t* growing, int n, const Levels* levels) {
  return status_of([&] { draw_level(*chains, level, growing, n, *levels); });
}

// Hydra: `states` [n, hidden] belong to the rows of the batch, which holds the tokens behind them.
Status slipstream_draft_hydra(const Heads* heads, const Model* embedder, const Batch* batch, const float* states,
                              const Chains* chains, Scratch* scratch, int threads) {
  return status_of([&] { draft_hydra(*heads, *embedder, *batch, states, *chains, *scratch, threads); });
}

}  // extern "C"
