// Choices among the numbers of a row: the largest, or by Gumbel noise.
#pragma once
#include <cmath>
#include <cstring>

#include "avx512.h"

namespace {

// One number of a SplitMix64 stream as u = (bits + 1/2) / 2^52; the definition is in noise.py.
inline uint64_t noise_bits(uint64_t stream, uint64_t index) {
  uint64_t z = stream + (index + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return (z ^ (z >> 31)) >> 12;
}

inline double gumbel(uint64_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-52)); }

// The first of the largest numbers, or the first NaN.
int64_t largest(const float *x, int64_t n) {
  __m512 top[4];
  for (auto &t : top) t = _mm512_set1_ps(-INFINITY);
  __mmask16 nan = 0;
  for (int64_t i = 0; i < n; i += 64)
    for (int j = 0; j < 4; ++j) {
      const int64_t at = i + j * 16;
      const __m512 v = _mm512_mask_loadu_ps(top[j], lanes(n - at), x + at);
      nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
      top[j] = _mm512_max_ps(top[j], v);
    }
  const float highest = _mm512_reduce_max_ps(
      _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
  const __m512 wanted = _mm512_set1_ps(highest);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps(lanes(n - i), x + i);
    const __mmask16 found = nan ? _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)
                                : _mm512_cmp_ps_mask(v, wanted, _CMP_EQ_OQ) & lanes(n - i);
    if (found) return i + __builtin_ctz(found);
  }
  return 0;
}

// largest() of a row that comes in blocks of 16, in order, while it is at hand.
struct Peak {
  alignas(64) float top[16];     // of each lane
  alignas(64) int32_t block[16];  // where
  __mmask16 nan;

  void clear() {
    for (int i = 0; i < 16; ++i) top[i] = -INFINITY, block[i] = 0;
    nan = 0;
  }
  void see(__mmask16 inside, __m512 x, int32_t from) {
    const __m512 before = _mm512_load_ps(top);
    const __mmask16 above = _mm512_mask_cmp_ps_mask(inside, x, before, _CMP_GT_OQ);
    nan |= _mm512_mask_cmp_ps_mask(inside, x, x, _CMP_UNORD_Q);
    _mm512_store_ps(top, _mm512_mask_mov_ps(before, above, x));
    _mm512_mask_store_epi32(block, above, _mm512_set1_epi32(from));
  }
};

// The same from `num` parts, `step` apart, each of which saw some of the row's blocks; x [n] is read
// only if one met a NaN.
inline int64_t largest(const Peak *parts, int64_t step, int64_t num, const float *x, int64_t n) {
  int64_t best = 0;
  float top = -INFINITY;
  for (int64_t p = 0; p < num; ++p) {
    const Peak &part = parts[p * step];
    if (part.nan) return largest(x, n);
    for (int i = 0; i < 16; ++i) {
      const int64_t at = part.block[i] * int64_t{16} + i;
      if (part.top[i] > top || (part.top[i] == top && at < best)) top = part.top[i], best = at;
    }
  }
  return best;
}

// (1 - u) * kSlack of the next eight numbers of a stream that begins at z.
inline __m256 gaps(__m512i z) {
  z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 30));
  z = _mm512_mullo_epi64(z, _mm512_set1_epi64(0xBF58476D1CE4E5B9));
  z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 27));
  z = _mm512_mullo_epi64(z, _mm512_set1_epi64(0x94D049BB133111EB));
  z = _mm512_srli_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 31)), 12);
  // As the fraction of a number in [1, 2).
  const __m512d u = _mm512_castsi512_pd(_mm512_or_si512(z, _mm512_set1_epi64(0x3ffll << 52)));
  constexpr double kSlack = 1.0 - 1e-4;  // far more than the rounding of w - score and its exp
  return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_sub_pd(_mm512_set1_pd(2.0), u), _mm512_set1_pd(kSlack)));
}

// At least exp(x), and 6 % more at most: 2^n * (1 + f) >= 2^(n + f).
inline __m512 exp_above(__m512 x) {
  const __m512 y = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269510f)), _mm512_set1_ps(-120));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEG_INF);
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_scalef_ps(_mm512_add_ps(one, _mm512_sub_ps(y, n)), n);
}

// The float32 at or next below x.
inline float below(double x) {
  const float y = static_cast<float>(x);
  return y > x ? std::nextafterf(y, -INFINITY) : y;
}

// argmax_v(log_w[v] + G_v), with logarithms of the noise only where it can win: from
// -log u >= 1 - u follows G <= -log(1 - u), so v can't beat a score s if exp(log_w - s) < 1 - u.
// Like other argmaxes it takes the first NaN if there is one. best: where to begin; that NaN, or any
// index, and the likelier the sooner it ends.
int64_t choose(uint64_t stream, const float *log_w, int64_t n, int64_t best) {
  if (std::isnan(log_w[best])) return best;
  double score = log_w[best] + gumbel(noise_bits(stream, best));
  constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;
  alignas(64) uint64_t first[8];
  for (int j = 0; j < 8; ++j) first[j] = stream + (j + 1) * kGamma;
  __m512i z = _mm512_load_si512(first);
  const __m512i eight = _mm512_set1_epi64(8 * kGamma);
  for (int64_t i = 0; i < n; i += 16) {
    const __m256 low = gaps(z);
    z = _mm512_add_epi64(z, eight);
    const __m512 gap = _mm512_insertf32x8(_mm512_castps256_ps512(low), gaps(z), 1);
    z = _mm512_add_epi64(z, eight);
    _mm_prefetch(reinterpret_cast<const char *>(log_w + i + 512), _MM_HINT_T0);
    const __m512 w = _mm512_maskz_loadu_ps(lanes(n - i), log_w + i);
    const __m512 above = exp_above(_mm512_sub_ps(w, _mm512_set1_ps(below(score))));
    unsigned may_win = _mm512_mask_cmp_ps_mask(lanes(n - i), above, gap, _CMP_GE_OQ);
    for (; may_win; may_win &= may_win - 1) {
      const int64_t v = i + __builtin_ctz(may_win);
      const double mine = log_w[v] + gumbel(noise_bits(stream, v));
      if (mine > score || (mine == score && v < best)) score = mine, best = v;
    }
  }
  return best;
}

}  // namespace
