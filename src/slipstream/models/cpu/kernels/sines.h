// Sines and cosines with the same bits on every machine; the C libraries' differ.
//
// Additions and multiplications of doubles, rounded to float once: within 0.501 units in the last place.
#pragma once

#include <cmath>
#include <cstdint>

struct Turn {
  float sine, cosine;
};

// `angle` in radians; NaN from 2^31 on, where a float's neighbours are hundreds of radians away.
inline Turn turned(float angle) {
  if (!(std::fabs(angle) < 0x1p31f)) return {NAN, NAN};
  // Less whole quarter turns. The first two pieces of pi / 2 have 22 bits each, so that their products are exact.
  constexpr double QUARTERS = 0x1.45f306dc9c883p-1;  // 2 / pi
  constexpr double HIGH = 0x1.921fbp+0, MIDDLE = 0x1.5110bp-22, LOW = 0x1.18469898cc517p-44;
  const int64_t quarters = int64_t(angle * QUARTERS + (angle < 0.0f ? -0.5 : 0.5));
  const double n = double(quarters);
  const double r = ((angle - n * HIGH) - n * MIDDLE) - n * LOW, square = r * r, fourth = square * square;
  // The polynomials of FreeBSD's k_sinf.c and k_cosf.c, for r within pi / 4.
  const double sine = (r + square * r * (-0x15555554cbac77.0p-55 + square * 0x111110896efbb2.0p-59)) +
                      square * r * fourth * (-0x1a00f9e2cae774.0p-65 + square * 0x16cd878c3b46a7.0p-71);
  const double cosine = ((1.0 + square * -0x1ffffffd0c5e81.0p-54) + fourth * 0x155553e1053a42.0p-57) +
                        square * fourth * (-0x16c087e80f1e27.0p-62 + square * 0x199342e0ee5069.0p-68);
  switch (quarters & 3) {
    case 0: return {float(sine), float(cosine)};
    case 1: return {float(cosine), float(-sine)};
    case 2: return {float(-sine), float(-cosine)};
    default: return {float(-cosine), float(sine)};
  }
}
