// The token with the highest logit, found while the output layer's products are made: no row of logits is written and read
// again.
//
// Weights of 16 or 32 bits need not be read, but for a few outputs, where the output layer is held in 8 bits besides. With an
// output's weights rounded from w to w + r and a row from x to x + d, its rounded logit is off by
//
//     (w + r)(x + d) - wx = (w + r)d + rx,  at most  |w + r||d| + |r||x|  (Cauchy and Schwarz)
//
// and by what sums of float32 numbers lose. So a token whose logit is at most less than another one's at least is not it. The
// logits of those that are left are computed as the output layer would, to the bit, and compared.
#pragma once

#include <climits>

#include "model.h"

// What a thread knows of the highest logit of a row.
struct BestToken {
  static constexpr int MOST = 128;  // candidates
  static constexpr float LEAST_OFF = 1e-30f;

  bool has_begun;  // false while its thread has computed no logits of the row
  bool is_known;   // false where a logit is no number
  float value;     // the highest logit so far, or of rounded ones what the highest one at least is
  int token;       // whose it is, the first of several; INT_MAX before the first
  float of_errors, of_norms;  // by which the norms of the errors and of the weights count in how far a rounded logit is off
  float dropped;  // what the logits of candidates that found no room are at most
  int count;
  int candidates[MOST];  // tokens whose logits may be the highest
  float most[MOST];      // what these logits are at most

  void begin() { has_begun = is_known = true, value = dropped = -INFINITY, token = INT_MAX, count = 0; }

  // A token's logit.
  void take(float logit, int number) {
    if (logit != logit) is_known = false;
    if (logit > value || (logit == value && number < token)) value = logit, token = number;
  }

  // Logits [UNIT] of the tokens from `first` on, of which there are `size`.
  void take(const float* logits, int first, int size) {
    ints found = {};
    for (int i = 0; i < UNIT; i += LANES) found |= ~(ints)(load(logits + i) < value);
    if (!sum(found)) return;
    for (int i = 0; i < size; ++i) take(logits[i], first + i);
  }

  // The row is multiplied with weights that are rounded in groups: `quantised` is what it is rounded to.
  void begin_rounded(const Linear& linear, const float* row, const uint8_t* quantised) {
    begin();
    double all = 0.0, lost = 0.0;
    for (int first = 0; first < linear.in; first += linear.group, quantised += row_group_bytes(linear.group)) {
      const RowGroup& group = *(const RowGroup*)quantised;
      for (int k = 0; k < std::min(linear.group, linear.in - first); ++k) {
        const double input = row[first + k], kept = k == group.place ? group.apart : double(group.scale) * group.integers[k];
        all += input * input;
        lost += (input - kept) * (input - kept);
      }
    }
    // Sums of n float32 products lose at most n 2^-24 of the sum of their magnitudes, which is at most |w||x|. The rounded
    // sums have fewer; the rest of the 2 n + 64 is for the bounds' own arithmetic. What is lost below the least normal number
    // is LEAST_OFF's.
    const double norm = std::sqrt(all), error = std::sqrt(lost), sums = (2.0 * linear.in + 64.0) * 0x1p-24;
    of_errors = float(norm * 1.0001);
    of_norms = float((error + sums * (norm + error)) * 1.0001);
    if (!(norm > 1e-15 && norm < 1e15)) is_known = false;
  }

  // Rounded logits [UNIT] of the tokens from `first` on, of which there are `size`; padding has infinite errors.
  void bound(const RoundedHead& head, const float* logits, int first, int size) {
    alignas(64) float most[UNIT];
    wide least = {};
    for (floats& part : least.parts) part = splat(value);
    for (int i = 0; i < UNIT; i += LANES) {
      const floats logit = load(logits + i);
      const floats off = load(head.errors + first + i) * of_errors + load(head.norms + first + i) * of_norms + LEAST_OFF;
      floats& highest = least.parts[i / LANES % (WIDE / LANES)];
      highest = larger(logit - off, highest);
      store(most + i, logit + off);
    }
    value = largest_lane(least);
    ints found = {};
    for (int i = 0; i < UNIT; i += LANES) found |= ~(ints)(load(most + i) < value);
    if (!sum(found)) return;
    for (int i = 0; i < size; ++i)
      if (!(most[i] < value)) add(first + i, most[i]);
  }

 private:
  void add(int number, float at_most) {
    if (count == MOST) {
      count = 0;
      for (int i = 0; i < MOST; ++i)
        if (!(most[i] < value)) candidates[count] = candidates[i], most[count++] = most[i];
    }
    if (count == MOST) {
      dropped = std::max(dropped, at_most);
    } else {
      candidates[count] = number, most[count++] = at_most;
    }
  }
};

static_assert(sizeof(BestToken) <= 1060);  // the memory plan counts as much
