// Attention over a paged KV cache: queries that read the same KV head, against chunks of it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>

#include "model.h"
#include "products.h"

namespace {

constexpr int CHUNK = 256;  // positions of one partial sum
constexpr int MAX_HEAD_DIM = 256;

int64_t padded_dim(const Config &c) { return (c.head_dim + DEPTH - 1) / DEPTH * DEPTH; }

// Softmaxes of 16 queries over some positions: each one's highest score, the sum of
// exp(score - highest), and the values weighted so. A view of SIZE(dim) floats.
struct Partials {
  float *highest, *mass, *value;  // [16], [16], [16][dim]

  static int64_t size(int64_t dim) { return TILE * (dim + 2); }
  explicit Partials(float *memory)
      : highest(memory), mass(memory + TILE), value(memory + 2 * TILE) {}

  void clear() { std::fill_n(mass, TILE, 0.0f); }
  // Adds one query's softmax over later positions to this one's.
  void merge(const Partials &other, int64_t q, int64_t dim) {
    if (other.mass[q] == 0.0f) return;
    float *mine = value + q * dim;
    const float *its = other.value + q * dim;
    if (mass[q] == 0.0f) {
      highest[q] = other.highest[q], mass[q] = other.mass[q];
      return void(std::copy_n(its, dim, mine));
    }
    const float top = std::max(highest[q], other.highest[q]);
    const float keep = exp1(highest[q] - top), take = exp1(other.highest[q] - top);
    for (int64_t i = 0; i < dim; ++i) mine[i] = mine[i] * keep + its[i] * take;
    mass[q] = mass[q] * keep + other.mass[q] * take;
    highest[q] = top;
  }
};

// Up to 16 queries of one sequence that read the same KV head.
struct Unit {
  int64_t sequence, kv_head, first_row, num_rows;
  int64_t first_chunk;  // where its partial sums are, if chunks are shared out
};

// Those queries against one chunk of positions, sixteen at a time. A row's result depends on its
// own positions alone: those that another row of the unit sees besides weigh 0, and values are
// always finite (see write_cache).
class ChunkAttention {
 public:
  ChunkAttention(const Config &c, const Layer &layer, const Batch &batch, const Unit &unit,
                 const bf16 *queries)
      : c_(c), layer_(layer), batch_(batch), unit_(unit), queries_(queries), dim_(padded_dim(c)),
        groups_(c.num_heads / c.num_kv_heads), num_(unit.num_rows * groups_),
        amx_(uses_amx(c, batch.num_rows)) {}

  void run(int64_t chunk, Partials out) {
    begin_ = chunk * CHUNK;
    end_ = std::min(begin_ + CHUNK, position(num_ - 1) + 1);
    const int64_t seen = first_seen(0);
    if (seen >= end_) return out.clear();
    start_ = std::max(begin_, seen / TILE * TILE);
    const int64_t *table = batch_.block_table + unit_.sequence * batch_.table_width;
    for (int64_t p = start_; p < end_; p += TILE) {
      const int64_t slot = table[p / c_.block_size] * c_.block_size + p % c_.block_size;
      at_[(p - begin_) / TILE] = (slot / TILE * c_.num_kv_heads + unit_.kv_head) * dim_ * TILE;
    }
    score();
    for (int64_t q = 0; q < num_; ++q) soften(q, out);
    weigh(out);
  }

 private:
  int64_t position(int64_t q) const { return batch_.positions[unit_.first_row + q / groups_]; }
  int64_t first_seen(int64_t q) const {
    return layer_.window ? std::max<int64_t>(0, position(q) + 1 - layer_.window) : 0;
  }

  void score() {
    for (int64_t p = start_; p < end_; p += TILE) {
      const bf16 *keys = layer_.keys + at_[(p - begin_) / TILE];
      float *to = scores_[0] + p - begin_;
      if (amx_) {
        _tile_zero(0);
        for (int64_t k = 0; k < dim_ / DEPTH; ++k) {
          _tile_loadd(4, queries_ + k * DEPTH, dim_ * 2);
          _tile_loadd(6, keys + k * TILE_SIZE, 64);
          _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, to, CHUNK * 4);
      } else {
        for_rows(num_, [&](int64_t q, auto rows) {
          __m512 sum[rows] = {};
          rows_avx512<rows>(queries_ + q * dim_, dim_, keys, dim_ / 2, sum);
          for (int r = 0; r < rows; ++r) _mm512_store_ps(to + (q + r) * CHUNK, sum[r]);
        });
      }
    }
  }

  // Scores of one query to weights in bfloat16; what it does not see weighs 0.
  void soften(int64_t q, Partials out) {
    const float *score = scores_[q] - begin_;
    bf16 *weight = weights_[q] - begin_;
    const int64_t from = first_seen(q), until = std::min(end_, position(q) + 1);
    auto seen = [&](int64_t p) -> __mmask16 {
      const int64_t before = std::clamp<int64_t>(from - p, 0, TILE);
      const int64_t upto = std::clamp<int64_t>(until - p, 0, TILE);
      return ((1u << upto) - 1) & ~((1u << before) - 1);
    };
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t p = start_; p < end_; p += TILE)
      top = _mm512_mask_max_ps(top, seen(p), top, _mm512_load_ps(score + p));
    const float highest = _mm512_reduce_max_ps(top);
    const __m512 scale = _mm512_set1_ps(c_.scale), shift = _mm512_set1_ps(highest);
    __m512 mass = _mm512_setzero_ps();
    for (int64_t p = start_; p < end_; p += TILE) {
      const __m512 s = _mm512_sub_ps(_mm512_load_ps(score + p), shift);
      const __m512 e = _mm512_maskz_mov_ps(seen(p), exp512(_mm512_mul_ps(s, scale)));
      const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(e);
      _mm256_store_si256(reinterpret_cast<__m256i *>(weight + p), rounded);
      mass = _mm512_add_ps(mass, widen(rounded));
    }
    out.highest[q] = highest * c_.scale;
    out.mass[q] = from < until ? _mm512_reduce_add_ps(mass) : 0.0f;
  }

  void weigh(Partials out) {
    if (amx_) {
      std::atomic_signal_fence(std::memory_order_seq_cst);  // as in Barrier
      static const TileConfig kHalf(TILE / 2);
      _tile_loadconfig(&kHalf);
      for (int64_t d = 0; d < dim_; d += DEPTH) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t p = start_; p < end_; p += TILE) {
          const bf16 *values = layer_.values + at_[(p - begin_) / TILE] + d * TILE;
          _tile_loadd(4, weights_[0] + p - begin_, CHUNK * 2);
          _tile_loadd(6, values, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, values + TILE * TILE, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, out.value + d, dim_ * 4);
        _tile_stored(1, out.value + d + TILE, dim_ * 4);
      }
      static const TileConfig kWhole;
      _tile_loadconfig(&kWhole);
      return;
    }
    for (int64_t d = 0; d < dim_; d += TILE)
      for_rows(num_, [&](int64_t q, auto rows) {
        __m512 sum[rows] = {};
        for (int64_t p = start_; p < end_; p += TILE) {
          const bf16 *values = layer_.values + at_[(p - begin_) / TILE] + d * TILE;
          rows_avx512<rows>(weights_[q] + p - begin_, CHUNK, values, TILE / 2, sum);
        }
        for (int r = 0; r < rows; ++r) _mm512_storeu_ps(out.value + (q + r) * dim_ + d, sum[r]);
      });
  }

 private:
  const Config &c_;
  const Layer &layer_;
  const Batch &batch_;
  const Unit &unit_;
  const bf16 *queries_;
  const int64_t dim_, groups_, num_;
  const bool amx_;
  int64_t begin_ = 0, start_ = 0, end_ = 0;
  int64_t at_[CHUNK / TILE];  // of sixteen slots of the KV head, in both pools
  alignas(64) float scores_[TILE][CHUNK];
  alignas(64) bf16 weights_[TILE][CHUNK];
};

}  // namespace
