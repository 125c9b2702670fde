// Vectors of float32, and what bfloat16 and float16 are to them. Uses the vector types of GCC and
// Clang, which turn them into whatever the processor has.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes of a vector
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

using Vec = float __attribute__((vector_size(4 * W)));
using Bits = uint32_t __attribute__((vector_size(4 * W)));
using Shorts = uint16_t __attribute__((vector_size(2 * W)));
struct Bf16 { uint16_t bits; };
struct Half { uint16_t bits; };

template <typename To, typename From> inline To cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
template <typename V> inline V load(const void *p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float *p, Vec x) { std::memcpy(p, &x, sizeof x); }
inline Vec fill(float x) { return x - Vec{}; }  // x + 0 would lose the sign of -0

inline Vec widen(const float *p) { return load<Vec>(p); }
inline Vec widen(const Half *p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(load<__m128i>(p));
#else  // exponents move by 112; infinities and NaN keep the highest one
  const Bits x = __builtin_convertvector(load<Shorts>(p), Bits), size = x & 0x7fff;
  const Bits special = (Bits)(size >= 0x7c00) & 0x7f800000;
  return cast<Vec>(cast<Bits>(cast<Vec>(size << 13) * 0x1p112f) | special | (x & 0x8000) << 16);
#endif
}

// Two dimensions of W neighbouring positions; `stride` is the number of slots in a block.
template <typename T> inline void load_keys(const T *p, int64_t stride, Vec &a, Vec &b) {
  a = widen(p), b = widen(p + stride);
}
// 2 W dimensions of a value, in whatever order; `place` says in which.
template <typename T> inline void load_values(const T *p, Vec &a, Vec &b) {
  a = widen(p), b = widen(p + W);
}
inline void load_values(const Bf16 *p, Vec &even, Vec &odd) {
  const Bits both = load<Bits>(p);
  even = cast<Vec>(both << 16), odd = cast<Vec>(both & 0xffff0000u);
}
inline void load_keys(const Bf16 *p, int64_t, Vec &a, Vec &b) { load_values(p, a, b); }

template <typename T> constexpr int PAIRED = 1;  // dimensions that lie together in keys
template <> constexpr int PAIRED<Bf16> = 2;
template <typename T> inline int64_t place(int64_t d) {
  if (PAIRED<T> == 1) return d;
  return d / (2 * W) * 2 * W + d % 2 * W + d % (2 * W) / 2;
}

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(Half x) {
  const uint32_t size = x.bits & 0x7fff, special = size >= 0x7c00 ? 0x7f800000 : 0;
  const float magnitude = cast<float>(size << 13) * 0x1p112f;
  return cast<float>(cast<uint32_t>(magnitude) | special | (x.bits & 0x8000u) << 16);
}
inline void put(float *to, float x) { *to = x; }
inline void put(Bf16 *to, float x) {
  const uint32_t bits = cast<uint32_t>(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to->bits = nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void put(Half *to, float x) {
  const uint32_t sign = cast<uint32_t>(x) >> 16 & 0x8000, bits = cast<uint32_t>(x) & 0x7fffffff;
  uint32_t size = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  if (bits > 0x7f800000) size = 0x7e00;        // NaN
  else if (bits >= 0x477ff000) size = 0x7c00;  // 65520 and more: infinity
  else if (bits < 0x38800000)                  // subnormal: next to 0.5 floats are 2^-24 apart
    size = cast<uint32_t>(cast<float>(bits) + 0.5f) - cast<uint32_t>(0.5f);
  to->bits = sign | size;
}

// exp to float32 accuracy for x <= 80: 2^n * e^r, |r| <= ln 2 / 2 (Cephes' polynomial); 0 below
// -87. NaN stays NaN.
inline Vec exponential(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it becomes whole
  const Bits keep = ~(Bits)(x < -87.0f);
  const Vec z = cast<Vec>(cast<Bits>(x) & keep);
  const Vec whole = z * 1.44269504f + kRound, n = whole - kRound;
  const Vec r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Bits power = (cast<Bits>(whole) - cast<uint32_t>(kRound) + 127) << 23;
  return cast<Vec>(cast<Bits>(p * cast<Vec>(power)) & keep);
}
inline float exponential1(float x) { return exponential(fill(x))[0]; }

// c * tanh(x / c)
inline Vec cap(Vec x, float c) {
  Vec t = x * (2.0f / c);
  t = cast<Vec>((cast<Bits>(t) & ~(Bits)(t > 30.0f)) | (cast<Bits>(fill(30.0f)) & (Bits)(t > 30.0f)));
  return c - (2.0f * c) / (exponential(t) + 1.0f);
}

}  // namespace
