// How far the kernels' sines and cosines are from the exact ones: prints the largest error in units in the last place of
// a float, over random angles up to 2^20, products of positions and frequencies, and the floats around quarter turns.
#include "sines.h"

#include <algorithm>
#include <cstdio>
#include <random>

static double worst = 0.0;

static void compare(float value, long double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  const long double unit = std::ldexp(1.0L, std::max(exponent - 24, -149));
  worst = std::max(worst, double(std::fabs(value - exact) / unit));
}

static void check(float angle) {
  const Turn turn = turned(angle);
  compare(turn.sine, std::sin((long double)angle));
  compare(turn.cosine, std::cos((long double)angle));
}

int main() {
  std::mt19937_64 generator(1);
  for (int i = 0; i < 1000000; ++i) {
    const float fraction = float(generator() >> 40) / float(1 << 24);
    check(std::ldexp(fraction, int(generator() % 41) - 20));  // 2^-20 to 2^20
    check(-fraction * 1048576.0f);
    check(float(generator() % 1048576) * std::pow(10000.0f, -fraction));
  }
  for (int quarter = 0; quarter < 700000; ++quarter) {
    const float angle = float(quarter * 1.5707963267948966);
    for (float near : {std::nextafter(angle, 0.0f), angle, std::nextafter(angle, INFINITY)}) check(near);
  }
  const bool odd = std::isnan(turned(NAN).sine) && std::isnan(turned(INFINITY).cosine) && std::isnan(turned(-0x1p31f).sine);
  std::printf("%.4f %s\n", worst, odd ? "and NaN where they must be" : "and numbers where NaN must be");
}
