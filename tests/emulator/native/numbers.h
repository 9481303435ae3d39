// The number formats of the instructions, and tensor maps.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// A binary float of 8 or 16 bits: `exponent` and `mantissa` bits below a sign.
struct Format {
  int exponent, mantissa;
  bool has_infinity;  // else the highest exponent holds numbers too, all ones is NaN (e4m3)

  int bits() const { return 1 + exponent + mantissa; }
  int bias() const { return (1 << (exponent - 1)) - 1; }

  float widen(uint32_t code) const {
    uint32_t m = code & ((1u << mantissa) - 1), e = code >> mantissa & ((1u << exponent) - 1);
    float sign = code >> (exponent + mantissa) & 1 ? -1.0f : 1.0f;
    uint32_t top = (1u << exponent) - 1;
    if (e == top && has_infinity) return m ? NAN : sign * INFINITY;
    if (e == top && m == (1u << mantissa) - 1) return NAN;
    if (e == 0) return sign * std::ldexp((float)m, 1 - bias() - mantissa);
    return sign * std::ldexp(1.0f + std::ldexp((float)m, -mantissa), (int)e - bias());
  }

  float largest() const {
    uint32_t top = (1u << exponent) - 1;
    uint32_t m = (1u << mantissa) - 1;
    return has_infinity ? widen((top - 1) << mantissa | m) : widen(top << mantissa | (m - 1));
  }

  // to nearest, ties to even; beyond the largest: infinity, or the largest where `saturate`
  uint32_t narrow(float value, bool saturate) const {
    uint32_t sign = (as_bits(value) >> 31) << (exponent + mantissa);
    uint32_t nan = has_infinity ? (1u << (exponent + mantissa)) - 1 : 0x7f;
    if (std::isnan(value)) return nan;
    double x = std::fabs((double)value);
    int e = x == 0 ? 0 : std::ilogb(x);
    e = std::max(e, 1 - bias());
    double step = std::ldexp(1.0, e - mantissa);
    double rounded = x / step;
    double floor = std::floor(rounded), rest = rounded - floor;
    if (rest > 0.5 || (rest == 0.5 && std::fmod(floor, 2.0) == 1.0)) floor += 1;
    double result = floor * step;
    if (result > largest()) {
      if (saturate) return sign | narrow(largest(), false);
      return sign | (has_infinity ? ((1u << exponent) - 1) << mantissa : nan);
    }
    if (result == 0) return sign;
    int re = std::max((int)std::ilogb(result), 1 - bias());
    uint32_t units = (uint32_t)std::ldexp(result, mantissa - re);
    bool is_normal = units >> mantissa;
    return sign | (is_normal ? (uint32_t)(re + bias()) << mantissa | (units & ((1u << mantissa) - 1))
                             : units);
  }
};

constexpr Format kHalf{5, 10, true}, kBfloat{8, 7, true}, kE4m3{4, 3, false}, kE5m2{5, 2, true};

inline float half_to_float(uint16_t code) {
  static float* table = [] {
    auto* made = new float[65536];
    for (int i = 0; i < 65536; ++i) made[i] = kHalf.widen(i);
    return made;
  }();
  return table[code];
}

inline uint16_t float_to_bfloat(float value) {
  uint32_t bits = as_bits(value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// What a 128-byte tensor map says. The layout of its bits is not documented: it was read off the
// maps that the compiler's host code writes for tensors that differ in one extent or stride.
struct TensorMap {
  uint64_t address;
  int rank;
  int element_bytes;
  int swizzle;         // bytes that a swizzle pattern spans: 32, 64 or 128
  uint64_t extent[5];  // the contiguous dimension first
  uint64_t stride[5];  // bytes
  uint32_t box[5];

  static TensorMap read(const void* source) {
    uint32_t w[32];
    memcpy(w, source, sizeof w);
    TensorMap map{};
    map.address = (uint64_t)w[1] << 32 | w[0];
    map.rank = (w[2] >> 4 & 7) + 1;
    map.element_bytes = (w[2] >> 8 & 15) == 0 ? 1 : 2;
    map.swizzle = 16 << (w[2] >> 13 & 3);
    map.stride[0] = map.element_bytes;
    for (int i = 0; i < map.rank; ++i) map.extent[i] = (uint64_t)w[8 + i] + 1;
    for (int i = 1; i < map.rank; ++i) {
      uint64_t high = w[7] >> (4 * (i - 1)) & 15;
      map.stride[i] = (high << 32 | w[2 + i]) << 4;
    }
    map.box[0] = (w[13] >> 24) + 1;
    for (int i = 1; i < map.rank; ++i) map.box[i] = (w[14] >> (8 * (i - 1)) & 255) + 1;
    return map;
  }

  uint32_t bytes() const {
    uint32_t total = element_bytes;
    for (int i = 0; i < rank; ++i) total *= box[i];
    return total;
  }
};

// Where byte `address` of a swizzled shared-memory tile lies.
inline uint32_t swizzled(uint32_t address, int span) {
  switch (span) {
    case 128: return address ^ (address >> 3 & 0x70);
    case 64: return address ^ (address >> 3 & 0x30);
    case 32: return address ^ (address >> 3 & 0x10);
    default: return address;
  }
}

}  // namespace emulator
