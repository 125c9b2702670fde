// Activations times packed weights, on AMX or AVX512-BF16; layouts are in kernels.cpp.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "avx512.h"
#include "threads.h"

namespace {

constexpr int TILE = 16;         // rows of X, and columns n, of one tile
constexpr int DEPTH = 32;        // k of one tile
constexpr int TILE_SIZE = TILE * DEPTH;
enum Format { BF16, INT8, INT4 };  // of weights; bytes of a tile:
constexpr int64_t TILE_BYTES[] = {2 * TILE_SIZE, TILE_SIZE + 2 * TILE, TILE_SIZE / 2 + 4 * TILE};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  // pairs: half the depth of a product, 16 or 8.
  explicit TileConfig(int pairs = TILE) {
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = TILE;
    for (int i : {4, 5}) bytes[i] = 4 * pairs;
    for (int i : {6, 7}) rows[i] = pairs;
  }
};

// Where a product finds its first operand: x + row * row_step + k * depth_step + k's number in 32.
// Activations lie in tiles like weights, [M/16][K/32][16][32], so that they are read in order.
struct Rows {
  const bf16 *x;
  int64_t row_step, depth_step, tile_step;  // tile_step: to the next 16 rows
};

inline Rows tiled(const std::vector<bf16> &x, int64_t width) {
  return {x.data(), DEPTH, TILE_SIZE, TILE * width};
}

// Where one number of a tiled X [M, width] is.
inline int64_t in_tiles(int64_t row, int64_t column, int64_t width) {
  return row / TILE * TILE * width + column / DEPTH * TILE_SIZE + row % TILE * DEPTH +
         column % DEPTH;
}

// 16 scales or minima, in float16, as two vectors of 8 numbers that stand twice.
inline void twice(const byte *p, __m512 both[2]) {
  const __m512 x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  both[0] = _mm512_permutexvar_ps(low, x);
  both[1] = _mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), x);
}

// A quantised tile to a bfloat16 one: q * scale, or q * scale + minimum.
template <int FORMAT>
inline void widen_tile(const byte *from, bf16 *to) {
  __m512 scale[2], minimum[2];
  twice(from, scale);
  if (FORMAT == INT4) twice(from + 2 * TILE, minimum);
  const byte *q = from + (FORMAT == INT8 ? 2 : 4) * TILE;
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int pair = 0; pair < TILE; ++pair) {
    __m512 low, high;
    if (FORMAT == INT8) {
      const __m128i *bytes = reinterpret_cast<const __m128i *>(q + pair * 32);
      low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
      high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
      low = _mm512_mul_ps(low, scale[0]), high = _mm512_mul_ps(high, scale[1]);
    } else {
      const __m512i bytes = _mm512_cvtepu8_epi32(
          _mm_loadu_si128(reinterpret_cast<const __m128i *>(q + pair * 16)));
      low = _mm512_permutexvar_ps(bytes, numbers);  // heeds four bits only
      high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
      low = _mm512_fmadd_ps(low, scale[0], minimum[0]);
      high = _mm512_fmadd_ps(high, scale[1], minimum[1]);
    }
    _mm512_store_si512(to + pair * 2 * TILE, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// A thread's room for widened tiles.
class Widened {
 public:
  void grow(int64_t n) {
    if (room_.size() < static_cast<size_t>(n + TILE_SIZE)) room_.resize(n + TILE_SIZE);
  }
  bf16 *data() {  // at a cache line
    return reinterpret_cast<bf16 *>((reinterpret_cast<uintptr_t>(room_.data()) + 63) / 64 * 64);
  }

 private:
  std::vector<bf16> room_;
};

// One or two packed blocks of 16 columns, as bfloat16 tiles: as they are, or widened into a buffer
// that has room for all of them or, if they are used once, for few.
template <int FORMAT>
struct Columns {
  const byte *packed;
  bf16 *buffer;
  int64_t depth, mask;
  int num;

  Columns(const byte *packed, bf16 *buffer, int64_t depth, int num, bool once)
      : packed(packed), buffer(buffer), depth(depth),
        mask(once && FORMAT != BF16 ? ROOM - 1 : INT64_MAX), num(num) {}

  static constexpr int64_t ROOM = 8, AHEAD = 5;  // tiles
  int64_t stride() const { return (mask == INT64_MAX ? depth : ROOM) * TILE_SIZE; }
  const bf16 *tile(int j, int64_t k) const {
    const bf16 *first = FORMAT == BF16 ? reinterpret_cast<const bf16 *>(packed) : buffer;
    return first + j * stride() + (k & mask) * TILE_SIZE;
  }
  // Gets tiles of one k from memory, and asks for those that will be next.
  void fetch(int64_t k) const {
    const int64_t next = k + AHEAD < depth ? k + AHEAD : k + AHEAD + depth;  // beyond this pair
    for (int j = 0; j < num; ++j) {
      const byte *soon = packed + (j * depth + next) * TILE_BYTES[FORMAT];
      for (int64_t i = 0; i < TILE_BYTES[FORMAT]; i += 64)
        _mm_prefetch(reinterpret_cast<const char *>(soon + i), _MM_HINT_T0);
      if (FORMAT != BF16)
        widen_tile<FORMAT>(packed + (j * depth + k) * TILE_BYTES[FORMAT],
                           buffer + j * stride() + (k & mask) * TILE_SIZE);
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);  // as in Barrier
  }
};

// C[2][2][16 * 16] = 16 or 32 rows of X [.., K] times one or two blocks of 16 columns. The sums of
// a row don't depend on how many rows or columns are asked for. `first`: columns are not there yet.
template <int FORMAT>
void tiles_amx(const Rows &x, int row_tiles, const Columns<FORMAT> &w, bool first,
               float c[2][2][TILE * TILE]) {
  const int64_t bytes = x.row_step * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < w.depth; ++k) {
    if (first) w.fetch(k);
    _tile_loadd(4, x.x + k * x.depth_step, bytes);
    _tile_loadd(6, w.tile(0, k), 64);
    _tile_dpbf16ps(0, 4, 6);
    if (w.num == 2) {
      _tile_loadd(7, w.tile(1, k), 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (row_tiles == 2) {
      _tile_loadd(5, x.x + x.tile_step + k * x.depth_step, bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (w.num == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c[0][0], 64);
  if (w.num == 2) _tile_stored(1, c[0][1], 64);
  if (row_tiles == 2) {
    _tile_stored(2, c[1][0], 64);
    if (w.num == 2) _tile_stored(3, c[1][1], 64);
  }
}

// C [ROWS][16] += ROWS rows of X times `pairs` pairs of k of a packed block of 16 columns.
template <int ROWS>
void rows_avx512(const bf16 *x, int64_t row_step, const bf16 *w, int pairs, __m512 *c) {
  for (int pair = 0; pair < pairs; ++pair) {
    const __m512bh weights = (__m512bh)_mm512_loadu_si512(w + pair * 2 * TILE);
    for (int r = 0; r < ROWS; ++r) {
      int32_t two;
      std::memcpy(&two, x + r * row_step + pair * 2, 4);
      c[r] = _mm512_dpbf16_ps(c[r], weights, (__m512bh)_mm512_set1_epi32(two));
    }
  }
}

// Calls use(row, number of rows as a constant) for rows in fours and what is left.
template <typename Use>
void for_rows(int64_t num_rows, Use use) {
  int64_t row = 0;
  for (; num_rows - row >= 4; row += 4) use(row, std::integral_constant<int, 4>());
  if (num_rows - row == 3) use(row, std::integral_constant<int, 3>());
  if (num_rows - row == 2) use(row, std::integral_constant<int, 2>());
  if (num_rows - row == 1) use(row, std::integral_constant<int, 1>());
}

// The same on processors without AMX; num_rows saves work, it changes no sum.
template <int FORMAT>
void tiles_avx512(const Rows &x, int64_t num_rows, const Columns<FORMAT> &w, bool first,
                  float c[2][2][TILE * TILE]) {
  if (first && FORMAT != BF16)
    for (int64_t k = 0; k < w.depth; ++k) w.fetch(k);
  for_rows(num_rows, [&](int64_t row, auto rows) {
    const bf16 *from = x.x + row / TILE * x.tile_step + row % TILE * x.row_step;
    for (int j = 0; j < w.num; ++j) {
      __m512 sum[rows] = {};
      for (int64_t k = 0; k < w.depth; ++k)
        rows_avx512<rows>(from + k * x.depth_step, x.row_step, w.tile(j, k), DEPTH / 2, sum);
      float *to = c[row / TILE][j] + row % TILE * TILE;
      for (int r = 0; r < rows; ++r) _mm512_store_ps(to + r * TILE, sum[r]);
    }
  });
}

// For each pair of column blocks in the share and each 32 rows of X, tiled and padded to a multiple
// of 32 rows with whatever: use(row, block, its 16 sums, those of the next block or null).
template <int FORMAT, typename Use>
void product(bool use_amx, Widened &widened, const std::vector<bf16> &x, int64_t num_rows,
             int64_t depth_k, const byte *w, Share blocks, Use use) {
  alignas(64) float c[2][2][TILE * TILE];
  const int64_t depth = depth_k / DEPTH;
  if (FORMAT != BF16) widened.grow(2 * std::max(depth, Columns<FORMAT>::ROOM) * TILE_SIZE);
  for (int64_t b = blocks.begin; b < blocks.end; b += 2) {
    const int num = std::min<int64_t>(2, blocks.end - b);
    const Columns<FORMAT> columns(w + b * depth * TILE_BYTES[FORMAT], widened.data(), depth, num,
                                  use_amx && num_rows <= 2 * TILE);
    for (int64_t row = 0; row < num_rows; row += 2 * TILE) {
      const int64_t rows = std::min<int64_t>(2 * TILE, num_rows - row);
      Rows from = tiled(x, depth_k);
      from.x += row * depth_k;
      if (use_amx) tiles_amx(from, rows > TILE ? 2 : 1, columns, row == 0, c);
      else tiles_avx512(from, rows, columns, row == 0, c);
      for (int64_t r = 0; r < rows; ++r) {
        const float *left = c[r / TILE][0] + r % TILE * TILE;
        use(row + r, b, left, num == 2 ? left + TILE * TILE : nullptr);
      }
    }
  }
}

// The same for use(row, block, its 16 sums).
template <typename Use>
auto one_by_one(Use use) {
  return [=](int64_t row, int64_t block, const float *left, const float *right) {
    use(row, block, _mm512_load_ps(left));
    if (right) use(row, block + 1, _mm512_load_ps(right));
  };
}

}  // namespace
