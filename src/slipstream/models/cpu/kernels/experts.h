// The MLP of a layer, up to what its last linear layer gives: one for all rows, or experts that each row chooses.
#pragma once

#include "worker.h"

class Mixer : protected Worker {
 protected:
  const Model& m;

  Mixer(const Model& model, Scratch& scratch, Team& team, int rank) : Worker(scratch, team, rank), m(model) {}

  static constexpr int NUM_OPERATIONS = 8;  // of `route` and `visit`

  // What a unit of gate and up makes together, or of up alone; returns how many numbers.
  int gate(const float* tile, float* out) const {
    if (!m.gated) {
      activate(m.activation, tile, UNIT, out);
      return UNIT;
    }
    for (int i = 0; i < PANEL; i += LANES) {
      const floats gate = load(tile + i), up = load(tile + PANEL + i);
      if (m.activation == CLAMPED_SILU) {
        store(out + i, clamped_silu(gate, up, m.gate_limit, m.gate_slope));
      } else {
        activate(m.activation, tile + i, LANES, out + i);
        store(out + i, load(out + i) * up);
      }
    }
    return PANEL;
  }

  // Send each of the first `rows` rows of `normed` to its experts.
  void route(const Mixture& mixture, int rows) {
    Routing& r = s.routing;
    multiply(EXPERTS, mixture.router, normed, rows, [&](int row, int unit, const float* tile) {
      const int begin = unit * UNIT, size = std::min(UNIT, m.num_experts - begin);
      std::memcpy(&r.numbers[size_t(row) * m.num_experts + begin], tile, sizeof(float) * size);
    });
    share(EXPERTS, rows, [&](int row) { r.choose(m, mixture.scales, row); });
    share(EXPERTS, 1, [&](int) { r.group(m, rows); });
  }

  // given = for each of the rows that were sent, the sum of what its experts make of the row in `normed`, by their shares.
  void visit(const Mixture& mixture, int rows) {
    Routing& r = s.routing;
    const int inner = mixture.down[0].in;
    const size_t wide = row_stride(m.hidden), narrow = row_stride(inner);
    const int num_visits = rows * m.num_chosen;
    share(EXPERTS, num_visits, [&](int visit) {
      const float* from = &normed[r.row_of[visit] * wide];
      const Linear& next = mixture.gate_up[0];
      if (quantises(next)) {
        quantise(next, from, quantised + visit * quantised_bytes(next));
      } else {
        std::memcpy(&s.visiting[visit * wide], from, sizeof(float) * m.hidden);
      }
    });
    multiply_visits(mixture.gate_up, num_visits, s.visiting.data(), [&](int visit, int unit, const float* tile) {
      alignas(64) float gated[UNIT];
      const int width = gate(tile, gated);
      std::memcpy(&s.gated[visit * narrow + unit * width], gated, sizeof(float) * std::min(width, inner - unit * width));
    });
    if (quantises(mixture.down[0])) share(EXPERTS, num_visits, [&](int visit) { ready(mixture.down[0], s.gated.data(), visit); });
    multiply_visits(mixture.down, num_visits, s.gated.data(), [&](int visit, int unit, const float* tile) {
      std::memcpy(&s.visiting[visit * wide + unit * UNIT], tile, sizeof(float) * std::min(UNIT, m.hidden - unit * UNIT));
    });
    share(EXPERTS, rows, [&](int row) {
      float* sum = &given[row * wide];
      std::fill_n(sum, m.hidden, 0.0f);
      for (size_t i = size_t(row) * m.num_chosen; i < size_t(row + 1) * m.num_chosen; ++i) {
        const float *from = &s.visiting[r.visits[i] * wide], part = r.shares[i];
        for (int k = 0; k < m.hidden; ++k) sum[k] += from[k] * part;
      }
    });
  }

 private:
  // The visits' rows times their experts' weights; a unit of an expert is computed for all of its visits at once. The number
  // of parts is that of the pass: a thread that comes late may find the next layer's visits.
  template <typename Take>
  void multiply_visits(const Linear* experts, int num_visits, const float* values, Take take) {
    const Routing& r = s.routing;
    const int units = num_units(experts[0].out), parts = std::min(std::min(m.num_experts, num_visits) * units, 8 * team.size());
    share(EXPERTS, parts, [&](int part) {
      const int64_t all = int64_t(r.num_visited) * units;
      for (int i = int(all * part / parts); i < int(all * (part + 1) / parts); ++i) {
        const int expert = r.visited[i / units], begin = r.first[expert];
        multiply_run(experts[expert], values, begin, r.first[expert + 1] - begin, i % units, take);
      }
    });
  }
};
