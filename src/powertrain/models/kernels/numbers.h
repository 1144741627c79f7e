// Numbers as the kernels in C++ share them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

inline uint16_t half_bits(float x) {         // bf16: to the nearest, ties to even; a NaN that arithmetic makes stays one
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr float LOG2E = 1.44269504f;

// 2^x to 2e-7 for x up to 127, exactly 0 below -126; Taylor's series of 2^f for |f| <= 1/2
inline float power_of_two(float x) {
  const float bounded = x < -126.f ? -126.f : x;
  const float whole = std::nearbyint(bounded);
  const float f = (bounded - whole) * 0.693147181f;
  const float series = 1.f + f * (1.f + f * (0.5f + f * (1.f / 6 + f * (1.f / 24 + f * (1.f / 120 + f * (1.f / 720))))));
  const float power = std::bit_cast<float>((int32_t(whole) + 127) << 23);
  return x < -126.f ? 0.f : series * power;
}

inline float sigmoid(float x) {
  const float power = power_of_two(-std::abs(x) * LOG2E);
  return (x < 0 ? power : 1.f) / (1.f + power);
}
