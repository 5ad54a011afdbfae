// What an MLP does between its linear layers, and caps: the same bits in every build, as the C libraries' are not.
#pragma once

#include "vectors.h"

// Mirrored by activations.py.
// CLAMPED_SILU is of gate and up together.
enum Activation : int32_t { SILU, GELU, GELU_TANH, CLAMPED_SILU, RELU_SQUARED };

// 1 / (1 + exp(-x))
inline floats sigmoid(floats x) {
  const floats small = exp_of_negative(x < 0.0f ? x : -x);
  return (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
}

// x * sigmoid(x)
inline floats silu(floats x) {
  floats small = exp_of_negative(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? small : splat(1.0f)) / (small + 1.0f);
}

// (1 + tanh(y)) / 2 is sigmoid(2 y): nothing is lost where both terms nearly cancel.
inline floats gelu_tanh(floats x) {
  constexpr float TWICE_ROOT = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return x * sigmoid(TWICE_ROOT * x * fused(x * x, splat(0.044715f), splat(1.0f)));
}

// (up + 1) gate sigmoid(slope gate), both kept from what lies beyond the limit: the gate above, up on both sides.
inline floats clamped_silu(floats gate, floats up, float limit, float slope) {
  const floats high = splat(limit), low = splat(-limit);
  gate = gate > high ? high : gate;
  up = up > high ? high : up < low ? low : up;
  return (up + 1.0f) * (gate * sigmoid(gate * slope));
}

// x times the share of a normal distribution below x. With a = |x|, the share beyond a is exp(-a^2 / 2) times a function
// that falls slowly: a polynomial in 1 / (1 + 0.3 a), whose relative error is below 2e-7.
inline floats gelu(floats x) {
  const floats a = x < 0.0f ? -x : x;
  const floats t = 1.0f / fused(a, splat(0.3f), splat(1.0f));
  floats p = splat(0.03567630425f);
  p = fused(p, t, splat(-0.15720924735f));
  p = fused(p, t, splat(0.20636382699f));
  p = fused(p, t, splat(-0.05369288102f));
  p = fused(p, t, splat(0.12856639922f));
  p = fused(p, t, splat(0.09991207719f));
  p = fused(p, t, splat(0.12075417489f));
  p = fused(p, t, splat(0.11962928623f));
  const floats beyond = exp_of_negative(-0.5f * a * a) * (p * t);
  return x * (x < 0.0f ? beyond : 1.0f - beyond);
}

// Below 0.625 a polynomial in x^2, whose relative error is below 1e-8.
inline floats hyperbolic_tangent(floats x) {
  const floats a = x < 0.0f ? -x : x, square = x * x, small = exp_of_negative(-2.0f * a);
  const floats large = (1.0f - small) / (1.0f + small);
  floats p = splat(-0.005704883952f);
  p = fused(p, square, splat(0.02063900046f));
  p = fused(p, square, splat(-0.05373968929f));
  p = fused(p, square, splat(0.1333144158f));
  p = fused(p, square, splat(-0.3333328068f));
  const floats near = fused(p * square, x, x);
  return a < 0.625f ? near : (x < 0.0f ? -large : large);
}

// What keeps x between -cap and cap.
inline floats capped(floats x, float cap) { return hyperbolic_tangent(x / cap) * cap; }

inline wide capped(const wide& x, float cap) {
  return each_part([&](int i) { return capped(x.parts[i], cap); });
}

// values [size], a multiple of LANES -> out, which may be the same
inline void activate(int32_t activation, const float* values, int size, float* out) {
  auto each = [&](auto function) {
    for (int i = 0; i < size; i += LANES) store(out + i, function(load(values + i)));
  };
  switch (activation) {
    case GELU: return each([](floats x) { return gelu(x); });
    case RELU_SQUARED: return each([](floats x) { return x < 0.0f ? splat(0.0f) : x * x; });
    case GELU_TANH: return each([](floats x) { return gelu_tanh(x); });
    default: each([](floats x) { return silu(x); });
  }
}
