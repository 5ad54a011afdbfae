// How far the kernels' activations and tangents are from the exact ones: prints the largest errors of gelu, gelu_tanh and
// hyperbolic_tangent, those of the first two relative to the number or to 1, whichever is larger, that of the last one
// relative to the result; then those of gelu and gelu_tanh relative to the result, down to where the share of the number that
// it is gets too small for a normal float.
#include "activations.h"

#include <cstdio>

enum Measure { TO_NUMBER, TO_RESULT };

constexpr double LEAST_SHARE = 2e-38;  // below exp(-87) the kernels take it for zero

template <typename Function, typename Exact>
static double worst(Function function, Exact exact, Measure measure) {
  double largest = 0.0;
  for (float x = -30.0f; x < 30.0f; x += 0.0007f) {
    float results[LANES];
    store(results, function(splat(x)));
    const double expected = exact(double(x));
    if (measure == TO_RESULT && !(std::fabs(expected / x) > LEAST_SHARE)) continue;
    const double scale = measure == TO_RESULT ? std::fabs(expected) : std::max(1.0, std::fabs(double(x)));
    largest = std::max(largest, std::fabs(results[LANES - 1] - expected) / scale);
  }
  return largest;
}

static double exact_gelu(double x) { return x * std::erfc(-x / std::sqrt(2.0)) / 2; }

// (1 + tanh(y)) / 2 would cancel.
static double exact_gelu_tanh(double x) {
  return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

int main() {
  std::printf("%.3g %.3g %.3g %.3g %.3g\n", worst(gelu, exact_gelu, TO_NUMBER), worst(gelu_tanh, exact_gelu_tanh, TO_NUMBER),
              worst(hyperbolic_tangent, [](double x) { return std::tanh(x); }, TO_RESULT),
              worst(gelu, exact_gelu, TO_RESULT), worst(gelu_tanh, exact_gelu_tanh, TO_RESULT));
  float odd[LANES];
  store(odd, gelu(splat(NAN)) + gelu_tanh(splat(NAN)) + hyperbolic_tangent(splat(NAN)));
  return odd[0] == odd[0];
}
