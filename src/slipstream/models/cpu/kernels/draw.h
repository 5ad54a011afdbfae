// The choice of a draft token from a row of logits: filters, the target's noise, the confidence in it.
//
// It follows sampling/processors.py and draft/model/growth.py. Where a rounding falls otherwise another token may be
// drafted, which a verifier that compares tokens never mistakes: no probability is told of a token that is drawn here.
#pragma once

#include <functional>
#include <vector>

#include "vectors.h"

// How the tokens of a chain are drawn. mirrored by structs.py.
struct Drawing {
  double min_p, top_p;      // filters; 0 and 1 let every token pass
  double least_confidence;  // the chain ends before `confidence` falls below; 0: never
  float temperature;        // that logits are divided by, above 0; the quotients are the scores
  int32_t top_k;            // a filter; 0 lets every token pass
  int64_t noisy;            // 0: always the most probable token
};

// The target's noise of a token, as sampling/noise.py has it: splitmix64's output number `token` from `key` on, an odd
// 53-bit integer, is a uniform number; its Gumbel noise is -log(-log(uniform)).
inline uint64_t uniform_bits(uint64_t key, int token) {
  uint64_t word = key + (uint64_t(token) + 1) * 0x9E3779B97F4A7C15u;
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
  word = (word ^ word >> 27) * 0x94D049BB133111EBu;
  return (word ^ word >> 31) >> 11 | 1;
}

inline double gumbel_of(uint64_t bits) { return -std::log(-std::log(double(bits) * 0x1p-53)); }

// NaN where one of the numbers is.
inline float largest_of(const float* values, int size) {
  wide best = splat_wide(-INFINITY), rest = {};
  float largest = -INFINITY, left = 0.0f;
  int i = 0;
  for (; i + WIDE <= size; i += WIDE) {
    wide next = load_wide(values + i);
    best = larger(next, best);
    rest = each_part([&](int part) { return next.parts[part] == next.parts[part] ? rest.parts[part] : next.parts[part]; });
  }
  for (; i < size; ++i) {
    largest = std::max(largest, values[i]);
    if (values[i] != values[i]) left = values[i];
  }
  return sum(rest) + left == 0.0f ? std::max(largest, largest_lane(best)) : NAN;
}

// Scores that are close to the highest one, in descending order: all from `cut` on if need be, else the first for which
// `enough` says so.
template <typename Enough>
inline void highest_scores(const float* logits, int size, float top, float temperature, float cut, Enough enough) {
  std::vector<float> scores;
  const float highest = top / temperature;
  for (float lead : {2.0f, 6.0f, 24.0f, INFINITY}) {
    const float bound = std::max(cut, highest - lead);
    const float least = bound * temperature - 1e-5f * std::fabs(bound * temperature);  // spares most of the divisions
    scores.clear();
    for (int i = 0; i < size; ++i) {
      if (logits[i] < least || logits[i] == -INFINITY) continue;
      const float score = logits[i] / temperature;
      if (score >= bound) scores.push_back(score);
    }
    std::sort(scores.begin(), scores.end(), std::greater<float>());
    if (enough(scores) || bound == cut) return;
  }
}

// The sum of exp(score - highest score) over the scores from `cut` on.
inline double mass_of(const float* logits, int size, float top, float temperature, float cut) {
  constexpr int AT_ONCE = 64 * WIDE;  // numbers that are added up in float32
  const float highest = top / temperature;
  double mass = 0.0;
  for (int begin = 0; begin < size; begin += AT_ONCE) {
    const int end = std::min(begin + AT_ONCE, size);
    wide total = {};
    for (int i = begin; i < end; i += WIDE) {
      alignas(64) float padded[WIDE];
      const float* from = logits + i;
      if (i + WIDE > end) {
        std::fill_n(padded, WIDE, -INFINITY);
        std::memcpy(padded, from, sizeof(float) * (end - i));
        from = padded;
      }
      total = total + each_part([&](int part) {
        const floats scores = load(from + part * LANES) / temperature;
        const floats shares = exp_of_negative(scores - highest);
        return scores >= splat(cut) ? shares : floats{};
      });
    }
    mass += sum(total);
  }
  return mass;
}

// The lowest score that passes the filters: min-p, then top-k of the rest, then top-p of the rest. A token whose score is
// equal to one that passes does too.
inline float cut_of(const float* logits, int size, float top, const Drawing& drawing) {
  const float temperature = drawing.temperature;
  float cut = -INFINITY;
  if (drawing.min_p > 0.0) cut = top / temperature + float(std::log(drawing.min_p));
  if (drawing.top_k > 0 && drawing.top_k < size) {
    const size_t count = drawing.top_k;
    highest_scores(logits, size, top, temperature, cut, [&](const std::vector<float>& scores) {
      if (scores.size() < count) return false;
      cut = std::max(cut, scores[count - 1]);
      return true;
    });
  }
  if (drawing.top_p < 1.0) {
    const double wanted = drawing.top_p * mass_of(logits, size, top, temperature, cut), highest = top / temperature;
    highest_scores(logits, size, top, temperature, cut, [&](const std::vector<float>& scores) {
      double before = 0.0;
      for (float score : scores) {
        if (before >= wanted) return true;  // the one before was the last to pass
        before += std::exp(score - highest);
        cut = score;
      }
      return false;
    });
  }
  return cut;
}

constexpr int64_t NOT_FINITE = -1, ENDED = -2;  // in place of a token

// The most probable token, with the target's noise added where `drawing` says so; NOT_FINITE unless the logits are finite
// or minus infinity, and one is finite. Ties go to the lowest id. ENDED where the chain ends for lack of `confidence`: the
// product of the highest probability at each level, which takes this level's in.
//
// The logarithms are computed for few tokens: first for those within LEAD of the most probable one; any other needs
// noise beyond one threshold to win.
inline int64_t choose(const float* logits, int size, const Drawing& drawing, uint64_t key, double& confidence) {
  constexpr float LEAD = 5.0f;
  const float top = largest_of(logits, size), temperature = drawing.temperature;
  if (!std::isfinite(top)) return NOT_FINITE;
  const bool sure = drawing.least_confidence == 0.0;
  const float cut = drawing.noisy || !sure ? cut_of(logits, size, top, drawing) : -INFINITY;
  if (!sure) {
    confidence /= mass_of(logits, size, top, temperature, cut);
    if (confidence < drawing.least_confidence) return ENDED;
  }
  if (!drawing.noisy) return std::find(logits, logits + size, top) - logits;
  const double scale = 1.0 / temperature;
  double best = -INFINITY;
  int64_t chosen = -1;
  auto consider = [&](int token, uint64_t bits) {
    if (logits[token] / temperature < cut) return;
    double score = logits[token] * scale + gumbel_of(bits);
    if (score > best || (score == best && token < chosen)) best = score, chosen = token;
  };
  const float leading = top - LEAD * temperature;
  for (int i = 0; i < size; ++i)
    if (logits[i] >= leading) consider(i, uniform_bits(key, i));
  // A uniform number u > exp(-exp(-x)) means noise above x; the margin covers the threshold's rounding.
  const uint64_t threshold = std::exp(-std::exp(leading * scale - best)) * (1 - 1e-9) * 0x1p53;
  constexpr int AT_ONCE = 64;
  uint64_t bits[AT_ONCE];
  for (int begin = 0; begin < size; begin += AT_ONCE) {
    uint64_t largest = 0;
    for (int i = 0; i < AT_ONCE; ++i) bits[i] = uniform_bits(key, begin + i), largest = std::max(largest, bits[i]);
    if (largest < threshold) continue;
    for (int i = 0; i < std::min(AT_ONCE, size - begin); ++i)
      if (bits[i] >= threshold && logits[begin + i] < leading && logits[begin + i] > -INFINITY) consider(begin + i, bits[i]);
  }
  return chosen;
}
