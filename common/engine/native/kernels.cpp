// A decoder step on CPU: one call runs all layers of a pre-norm transformer (RMSNorm, rotary,
// grouped-query attention over a paged KV cache, gated MLP) in bfloat16 with float32 sums.
//
// Row invariance. A row's result is the same bits whatever else is in the batch and however many
// threads run: every product sums over K in one order, 32 at a time; attention sums over chunks
// of CHUNK positions, counted from position 0, and merges them in order.
//
// Layouts. A weight [N, K] is packed into tiles of 16 n by 32 k, [N/16][K/32][k/2][n][2]: what
// AMX wants as its second operand, and AVX512-BF16 as well; quantised ones are widened to that on
// their way (see quantization.py). Sixteen keys of one KV head are
// packed just so, [D/32][d/2][slot][2], and their values as [D/16][slot/2][d][2]: the weights of
// positions are then the first operand. D is padded to 32.
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

using bf16 = uint16_t;
using byte = uint8_t;

namespace {

constexpr int TILE = 16;         // rows of X, and columns n, of one tile
constexpr int DEPTH = 32;        // k of one tile
constexpr int TILE_SIZE = TILE * DEPTH;
constexpr int CHUNK = 256;       // positions of one partial sum of attention
constexpr int MAX_HEAD_DIM = 256;
enum Format { BF16, INT8, INT4 };  // of weights; bytes of a tile:
constexpr int64_t TILE_BYTES[] = {2 * TILE_SIZE, TILE_SIZE + 2 * TILE, TILE_SIZE / 2 + 4 * TILE};

struct Layer {
  const byte *qkv, *out, *gate_up, *down;  // packed; gate and up take turns tile by tile
  const float *input_norm, *post_norm;
  const float *qkv_bias;         // null: none
  const float *q_norm, *k_norm;  // null: none
  bf16 *keys, *values;           // the KV cache
  int64_t window;                // positions a row sees, its own included; 0: all
};

struct Config {
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  int64_t block_size, num_threads, use_amx, batch_dependent;
  int64_t format, head_format;   // of the layers' weights and of lm_head
  float epsilon, scale;
  const bf16 *embedding;         // [vocab, hidden]
  const byte *lm_head;           // packed
  const float *final_norm;
  const float *cosines, *sines;  // [context, head_dim / 2]
};

// One row is a little faster without; but then its bits are not those that it has in a batch.
inline bool uses_amx(const Config &c, int64_t num_rows) {
  return c.use_amx && !(c.batch_dependent && num_rows == 1);
}

struct Batch {
  int64_t num_rows, num_sequences, table_width, num_logits;
  const int64_t *token_ids, *positions, *slots, *query_start, *context_len, *block_table;
  const int64_t *logit_rows;
  float *logits;                 // [num_logits, vocab]
};

// -- numbers ------------------------------------------------------------------------------

inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN stays NaN
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 load_bf16(const bf16 *p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

inline void store_bf16(bf16 *p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh(x));
}

// The first n of 16 lanes.
inline __mmask16 lanes(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// The first n of 16 numbers, the rest 0.
inline __m256i round_bf16(const float *p, int64_t n) {
  return (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes(n), p));
}

// exp to float32 accuracy: 2^n * e^r, |r| <= ln 2 / 2 (Cephes' polynomial).
inline __m512 exp512(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-87.3f), x);  // in this order NaN stays NaN
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

inline float exp1(float x) { return _mm512_cvtss_f32(exp512(_mm512_set1_ps(x))); }

// -- threads ------------------------------------------------------------------------------

// Waits of a few microseconds: spins, and yields if another process has the core.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void wait() {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // tile loads don't say that they read
    if (n_ == 1) return;
    const int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins < 4000) _mm_pause(); else sched_yield();
    }
  }

 private:
  const int n_;
  std::atomic<int> arrived_{0}, turn_{0};
};

struct Share {
  int64_t begin, end;
  Share(int64_t n, int thread, int num_threads)
      : begin(n * thread / num_threads), end(n * (thread + 1) / num_threads) {}
};

// -- products -----------------------------------------------------------------------------

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

// -- small operations ---------------------------------------------------------------------

float mean_square(const float *x, int64_t n) {
  __m512 sum = _mm512_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  float total = _mm512_reduce_add_ps(sum);
  for (; i < n; ++i) total += x[i] * x[i];
  return total / n;
}

// One row to tiles: 32 columns at a time, out + i * TILE for column i.
void rms_norm(const float *x, const float *weight, int64_t n, float epsilon, bf16 *out) {
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(mean_square(x, n) + epsilon));
  for (int64_t i = 0; i < n; i += TILE) {
    const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), factor);
    store_bf16(out + i / DEPTH * TILE_SIZE + i % DEPTH, _mm512_mul_ps(y, _mm512_loadu_ps(weight + i)));
  }
}

// Norm (where the model has one) and rotary embedding of one head, in place.
void turn(float *x, const float *norm, const Config &c, int64_t position) {
  const int64_t half = c.head_dim / 2;
  if (norm) {
    const float factor = 1.0f / std::sqrt(mean_square(x, c.head_dim) + c.epsilon);
    for (int64_t i = 0; i < c.head_dim; ++i) x[i] *= factor * norm[i];
  }
  const float *cosine = c.cosines + position * half, *sine = c.sines + position * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

// x / (1 + exp(-x)), the division by an estimate and two steps of Newton's.
inline __m512 silu(__m512 x) {
  const __m512 two = _mm512_set1_ps(2.0f);
  const __m512 y = _mm512_add_ps(_mm512_set1_ps(1.0f), exp512(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  __m512 inverse = _mm512_rcp14_ps(y);
  inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(y, inverse, two));
  inverse = _mm512_mul_ps(inverse, _mm512_fnmadd_ps(y, inverse, two));
  return _mm512_mul_ps(x, inverse);
}

// -- attention ----------------------------------------------------------------------------

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

// -- the step -----------------------------------------------------------------------------

struct Buffers {
  std::vector<float> x, wide, partials;
  std::vector<bf16> normed, queries, attended, gated;
  std::vector<Unit> units;
  std::vector<std::pair<int64_t, int64_t>> chunks;  // (unit, chunk); empty: units aren't split
  std::atomic<int64_t> next{0};                     // unit or chunk that nobody has taken yet
};

struct Model {
  Config config;
  std::vector<Layer> layers;
  Buffers buffers;
};

// Splits the batch's rows into units of up to 16 queries. Units too few to keep all threads busy
// are split by chunks; either way chunks are merged in order by the same function, so that the
// sums are the same.
void make_units(const Config &c, const Batch &batch, Buffers &b) {
  const int64_t rows = std::max<int64_t>(1, TILE / (c.num_heads / c.num_kv_heads));
  int64_t num_chunks = 0;
  b.units.clear();
  b.chunks.clear();
  for (int64_t s = 0; s < batch.num_sequences; ++s)
    for (int64_t r = batch.query_start[s]; r < batch.query_start[s + 1]; r += rows)
      for (int64_t h = 0; h < c.num_kv_heads; ++h) {
        const int64_t num_rows = std::min(rows, batch.query_start[s + 1] - r);
        b.units.push_back({s, h, r, num_rows, num_chunks});
        num_chunks += batch.positions[r + num_rows - 1] / CHUNK + 1;
      }
  const int64_t num_units = b.units.size();
  if (c.num_threads == 1 || num_units >= 8 * c.num_threads || num_chunks == num_units) return;
  for (int64_t u = 0; u < num_units; ++u)
    for (int64_t i = b.units[u].first_chunk;
         i < (u + 1 < num_units ? b.units[u + 1].first_chunk : num_chunks); ++i)
      b.chunks.emplace_back(u, i - b.units[u].first_chunk);
  b.partials.resize(std::max<size_t>(b.partials.size(), num_chunks * Partials::size(padded_dim(c))));
}

class Step {
 public:
  Step(Model &model, const Batch &batch, Barrier &barrier, int thread)
      : c_(model.config), b_(model.buffers), batch_(batch), barrier_(barrier), thread_(thread),
        dim_(padded_dim(c_)), width_((c_.num_heads + 2 * c_.num_kv_heads) * c_.head_dim),
        amx_(uses_amx(c_, batch.num_rows)) {}

  void run(const std::vector<Layer> &layers) {
    embed();
    for (const Layer &layer : layers) {
      norm(layer.input_norm);
      project(layer);
      write_cache(layer);
      attend(layer);
      add_product(b_.attended, c_.num_heads * c_.head_dim, layer.out);
      norm(layer.post_norm);
      gate(layer);
      add_product(b_.gated, c_.intermediate, layer.down);
    }
    logits();
  }

 private:
  Share share(int64_t n) const { return Share(n, thread_, c_.num_threads); }

  // Column blocks in pairs, so that gate and up stay together.
  Share blocks(int64_t columns) const {
    Share pairs = share((columns + 2 * TILE - 1) / (2 * TILE));
    pairs.begin *= 2;
    pairs.end = std::min(2 * pairs.end, (columns + TILE - 1) / TILE);
    return pairs;
  }

  // X times a layer's weights, or those of lm_head; this thread's share of the columns.
  template <typename Use>
  void multiply(const std::vector<bf16> &x, int64_t num_rows, int64_t depth, const byte *w,
                int64_t columns, Use use) {
    auto run = [&](auto format) {
      product<format>(amx_, widened_, x, num_rows, depth, w, blocks(columns), use);
    };
    const int64_t format = w == c_.lm_head ? c_.head_format : c_.format;
    if (format == BF16) run(std::integral_constant<int, BF16>());
    else if (format == INT8) run(std::integral_constant<int, INT8>());
    else run(std::integral_constant<int, INT4>());
  }

  int64_t take() { return b_.next.fetch_add(1, std::memory_order_relaxed); }

  void embed() {
    const Share rows = share(batch_.num_rows);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      for (int64_t i = 0; i < c_.hidden; i += 16)
        _mm512_storeu_ps(&b_.x[r * c_.hidden + i],
                         load_bf16(c_.embedding + batch_.token_ids[r] * c_.hidden + i));
    barrier_.wait();
  }

  void norm(const float *weight) {
    const Share rows = share(batch_.num_rows);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      rms_norm(&b_.x[r * c_.hidden], weight, c_.hidden, c_.epsilon, &b_.normed[in_tiles(r, 0, c_.hidden)]);
    barrier_.wait();
  }

  void project(const Layer &layer) {
    auto keep = [&](int64_t row, int64_t block, __m512 sums) {
      const __mmask16 inside = lanes(width_ - block * TILE);
      if (layer.qkv_bias)
        sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(inside, layer.qkv_bias + block * TILE));
      _mm512_mask_storeu_ps(&b_.wide[row * width_ + block * TILE], inside, sums);
    };
    multiply(b_.normed, batch_.num_rows, c_.hidden, layer.qkv, width_, one_by_one(keep));
    barrier_.wait();
  }

  void write_cache(const Layer &layer) {
    const Share rows = share(batch_.num_rows);
    const int64_t d = c_.head_dim, groups = c_.num_heads / c_.num_kv_heads;
    if (thread_ == 0) b_.next = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      float *row = &b_.wide[r * width_];
      for (int64_t h = 0; h < c_.num_heads; ++h) {
        turn(row + h * d, layer.q_norm, c_, batch_.positions[r]);
        // Queries of one KV head lie together: [kv head][row][group], as units read them.
        bf16 *q = &b_.queries[((h / groups * batch_.num_rows + r) * groups + h % groups) * dim_];
        for (int64_t i = 0; i < d; i += TILE)
          _mm256_mask_storeu_epi16(q + i, lanes(d - i), round_bf16(row + h * d + i, d - i));
      }
      for (int64_t h = 0; h < c_.num_kv_heads; ++h) {
        float *k = row + (c_.num_heads + h) * d, *v = k + c_.num_kv_heads * d;
        turn(k, layer.k_norm, c_, batch_.positions[r]);
        write_slot(layer, batch_.slots[r], h, k, v);
      }
    }
    barrier_.wait();
  }

  void write_slot(const Layer &layer, int64_t slot, int64_t kv_head, float *k, float *v) {
    const int64_t d = c_.head_dim;
    const int64_t group = (slot / TILE * c_.num_kv_heads + kv_head) * dim_ * TILE;
    // Values are stored finite, for a weight of 0 times NaN is NaN; the key then tells it.
    float sum = 0.0f;
    for (int64_t i = 0; i < d; ++i) sum += v[i] * 0.0f;
    if (sum != 0.0f) std::fill_n(v, d, 0.0f), std::fill_n(k, d, NAN);
    alignas(32) bf16 key[MAX_HEAD_DIM];
    bf16 *keys = layer.keys + group + slot % TILE * 2;
    bf16 *values = layer.values + group + slot % TILE / 2 * 2 * TILE;
    // Of a line of values, which are those of two slots in turn, this slot's half.
    const __mmask32 mine = slot % 2 ? 0xaaaaaaaa : 0x55555555;
    for (int64_t i = 0; i < d; i += TILE) {
      _mm256_store_si256(reinterpret_cast<__m256i *>(key + i), round_bf16(k + i, d - i));
      __m512i line = _mm512_cvtepu16_epi32(round_bf16(v + i, d - i));
      if (slot % 2) line = _mm512_slli_epi32(line, 16);
      _mm512_mask_storeu_epi16(values + i * TILE, mine, line);
    }
    for (int64_t i = 0; i < d; i += 2) std::memcpy(keys + i * TILE, key + i, 4);
  }

  void attend(const Layer &layer) {
    const int64_t num_units = b_.units.size(), num_chunks = b_.chunks.size();
    alignas(64) float memory[2][TILE * (MAX_HEAD_DIM + 2)];
    Partials partials(memory[0]), sums(memory[1]);
    auto queries = [&](const Unit &unit) {
      const int64_t first = unit.kv_head * batch_.num_rows + unit.first_row;
      return &b_.queries[first * (c_.num_heads / c_.num_kv_heads) * dim_];
    };
    const int64_t size = Partials::size(dim_);
    if (num_chunks) {
      for (int64_t i; (i = take()) < num_chunks;) {
        const auto [u, chunk] = b_.chunks[i];
        ChunkAttention(c_, layer, batch_, b_.units[u], queries(b_.units[u]))
            .run(chunk, Partials(&b_.partials[i * size]));
      }
      barrier_.wait();
      if (thread_ == 0) b_.next = 0;
      barrier_.wait();
    }
    for (int64_t u; (u = take()) < num_units;) {
      const Unit &unit = b_.units[u];
      const int64_t groups = c_.num_heads / c_.num_kv_heads, num = unit.num_rows * groups;
      const int64_t last = batch_.positions[unit.first_row + unit.num_rows - 1];
      ChunkAttention attention(c_, layer, batch_, unit, queries(unit));
      sums.clear();
      for (int64_t chunk = 0; chunk * CHUNK <= last; ++chunk) {
        Partials part = num_chunks ? Partials(&b_.partials[(unit.first_chunk + chunk) * size])
                                   : partials;
        if (!num_chunks) attention.run(chunk, part);
        for (int64_t q = 0; q < num; ++q) sums.merge(part, q, dim_);
      }
      for (int64_t q = 0; q < num; ++q) {
        const int64_t row = unit.first_row + q / groups, head = unit.kv_head * groups + q % groups;
        const float factor = 1.0f / sums.mass[q];
        for (int64_t i = 0; i < c_.head_dim; i += TILE)
          put(row, head * c_.head_dim + i, std::min<int64_t>(TILE, c_.head_dim - i),
              _mm512_mul_ps(_mm512_load_ps(sums.value + q * dim_ + i), _mm512_set1_ps(factor)));
      }
    }
    barrier_.wait();
  }

  // The first n lanes to columns of `attended`; those of a head may begin anywhere in a tile.
  void put(int64_t row, int64_t column, int64_t n, __m512 x) {
    const int64_t width = c_.num_heads * c_.head_dim;
    if (n == TILE && column % TILE == 0)
      return store_bf16(&b_.attended[in_tiles(row, column, width)], x);
    alignas(32) bf16 rounded[TILE];
    store_bf16(rounded, x);
    for (int64_t i = 0; i < n; ++i) b_.attended[in_tiles(row, column + i, width)] = rounded[i];
  }

  void add_product(const std::vector<bf16> &x, int64_t depth, const byte *w) {
    auto add = [&](int64_t row, int64_t block, __m512 sums) {
      float *to = &b_.x[row * c_.hidden + block * TILE];
      _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sums));
    };
    multiply(x, batch_.num_rows, depth, w, c_.hidden, one_by_one(add));
    barrier_.wait();
  }

  void gate(const Layer &layer) {
    auto keep = [&](int64_t row, int64_t block, const float *gates, const float *ups) {
      const __m512 y = _mm512_mul_ps(_mm512_load_ps(ups), silu(_mm512_load_ps(gates)));
      store_bf16(&b_.gated[in_tiles(row, block / 2 * TILE, c_.intermediate)], y);
    };
    multiply(b_.normed, batch_.num_rows, c_.hidden, layer.gate_up, 2 * c_.intermediate, keep);
    barrier_.wait();
  }

  void logits() {
    const Share rows = share(batch_.num_logits);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      rms_norm(&b_.x[batch_.logit_rows[r] * c_.hidden], c_.final_norm, c_.hidden, c_.epsilon,
               &b_.normed[in_tiles(r, 0, c_.hidden)]);
    barrier_.wait();
    auto keep = [&](int64_t row, int64_t block, __m512 sums) {
      float *to = batch_.logits + row * c_.vocab + block * TILE;
      _mm512_mask_storeu_ps(to, lanes(c_.vocab - block * TILE), sums);
    };
    multiply(b_.normed, batch_.num_logits, c_.hidden, c_.lm_head, c_.vocab, one_by_one(keep));
    barrier_.wait();
  }

  const Config &c_;
  Buffers &b_;
  const Batch &batch_;
  Barrier &barrier_;
  const int thread_;
  const int64_t dim_, width_;
  const bool amx_;
  Widened widened_;
};

void make_room(const Config &c, int64_t num_rows, Buffers &b) {
  const int64_t rows = (num_rows + 2 * TILE - 1) / (2 * TILE) * 2 * TILE;
  const int64_t groups = c.num_heads / c.num_kv_heads;
  auto grow = [](auto &buffer, int64_t n) {
    if (static_cast<int64_t>(buffer.size()) < n) buffer.resize(n);
  };
  grow(b.x, rows * c.hidden);
  grow(b.normed, rows * c.hidden);
  grow(b.wide, rows * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim);
  // A unit reads a whole tile of queries, so there is room for one beyond the last.
  grow(b.queries, (rows * c.num_kv_heads * groups + TILE) * padded_dim(c));
  grow(b.attended, rows * c.num_heads * c.head_dim);
  grow(b.gated, rows * c.intermediate);
}

// -- noise --------------------------------------------------------------------------------

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

// (1 - u) * kSlack of the next eight numbers of a stream that begins at z.
inline __m256 gaps(__m512i z) {
  z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 30));
  z = _mm512_mullo_epi64(z, _mm512_set1_epi64(0xBF58476D1CE4E5B9));
  z = _mm512_xor_si512(z, _mm512_srli_epi64(z, 27));
  z = _mm512_mullo_epi64(z, _mm512_set1_epi64(0x94D049BB133111EB));
  z = _mm512_srli_epi64(_mm512_xor_si512(z, _mm512_srli_epi64(z, 31)), 12);
  // As the fraction of a number in [1, 2).
  const __m512d u = _mm512_castsi512_pd(_mm512_or_si512(z, _mm512_set1_epi64(0x3ffll << 52)));
  constexpr double kSlack = 1.0 - 1e-4;  // far more than float32's rounding
  return _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_sub_pd(_mm512_set1_pd(2.0), u), _mm512_set1_pd(kSlack)));
}

// At least exp(x), and 6 % more at most: 2^n * (1 + f) >= 2^(n + f).
inline __m512 exp_above(__m512 x) {
  const __m512 y = _mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269510f)), _mm512_set1_ps(-120));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEG_INF);
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_scalef_ps(_mm512_add_ps(one, _mm512_sub_ps(y, n)), n);
}

// argmax_v(log_w[v] + G_v), with logarithms of the noise only where it can win: from
// -log u >= 1 - u follows G <= -log(1 - u), so v can't beat a score s if exp(log_w - s) < 1 - u.
// Like other argmaxes it takes the first NaN if there is one.
int64_t choose(uint64_t stream, const float *log_w, int64_t n) {
  int64_t best = largest(log_w, n);
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
    const __m512 w = _mm512_maskz_loadu_ps(lanes(n - i), log_w + i);
    const __m512 above = exp_above(_mm512_sub_ps(w, _mm512_set1_ps(static_cast<float>(score))));
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

extern "C" {

// choose() for each of num_rows rows of log_w [num_rows, n]; largest() without streams.
void tandem_choose(const int64_t *streams, const float *log_w, int64_t num_rows, int64_t n,
                   int64_t num_threads, int64_t *chosen) {
#pragma omp parallel for num_threads(std::min(num_threads, num_rows))
  for (int64_t r = 0; r < num_rows; ++r)
    chosen[r] = streams ? choose(streams[r], log_w + r * n, n) : largest(log_w + r * n, n);
}

// Whether the kernel lets this process use AMX; asks for it.
int tandem_request_amx() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

void *tandem_create(const Config *config, const Layer *layers) {
  return new Model{*config, std::vector<Layer>(layers, layers + config->num_layers), {}};
}

void tandem_destroy(void *model) { delete static_cast<Model *>(model); }

void tandem_forward(void *handle, const Batch *batch) {
  Model &model = *static_cast<Model *>(handle);
  make_room(model.config, batch->num_rows, model.buffers);
  make_units(model.config, *batch, model.buffers);
  const bool amx = uses_amx(model.config, batch->num_rows);
  Barrier barrier(model.config.num_threads);
#pragma omp parallel num_threads(model.config.num_threads)
  {
    TileConfig tiles;
    if (amx) _tile_loadconfig(&tiles);
    Step(model, *batch, barrier, omp_get_thread_num()).run(model.layers);
    if (amx) _tile_release();
  }
}
}
