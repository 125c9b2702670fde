// A decoder step on CPU: one call runs all layers of a pre-norm transformer (RMSNorm, rotary,
// grouped-query attention over a paged KV cache, gated MLP) in bfloat16 with float32 sums.
//
// Row invariance. A row's result is the same bits whatever else is in the batch and however many
// threads run: every product sums over K in one order, 32 at a time; attention sums over chunks
// of CHUNK positions, counted from position 0, and merges them in order.
//
// Layouts. A weight [N, K] is packed into tiles of 16 n by 32 k, [N/16][K/32][k/2][n][2]: what
// AMX wants as its second operand, and AVX512-BF16 as well. Sixteen keys of one KV head are
// packed just so, [D/32][d/2][slot][2]; values are rows, [slot][D]. D is padded to 32.
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
#include <vector>

using bf16 = uint16_t;

namespace {

constexpr int TILE = 16;         // rows of X, and columns n, of one tile
constexpr int DEPTH = 32;        // k of one tile
constexpr int TILE_SIZE = TILE * DEPTH;
constexpr int CHUNK = 256;       // positions of one partial sum of attention
constexpr int MAX_HEAD_DIM = 256;

struct Layer {
  const bf16 *qkv, *out, *gate_up, *down;  // packed; gate and up take turns tile by tile
  const float *input_norm, *post_norm;
  const float *qkv_bias;         // null: none
  const float *q_norm, *k_norm;  // null: none
  bf16 *keys, *values;           // the KV cache
  int64_t window;                // positions a row sees, its own included; 0: all
};

struct Config {
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  int64_t block_size, num_threads, use_amx;
  float epsilon, scale;
  const bf16 *embedding;         // [vocab, hidden]
  const bf16 *lm_head;           // packed
  const float *final_norm;
  const float *cosines, *sines;  // [context, head_dim / 2]
};

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

inline __m512 load_bf16(const bf16 *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16));
}

// exp to float32 accuracy: 2^n * e^r, |r| <= ln 2 / 2 (Cephes' polynomial).
inline __m512 exp512(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.3f));
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
  TileConfig() {
    for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = 16;
  }
};

// C[2][2][16 * 16] = 16 or 32 rows of X [.., K] times one or two packed blocks of 16 columns.
// The sums of a row don't depend on how many rows or columns are asked for.
void tiles_amx(const bf16 *x, int64_t stride, int row_tiles, const bf16 *w, int64_t w_stride,
               int column_tiles, int64_t depth, float c[2][2][TILE * TILE]) {
  const int64_t bytes = stride * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; ++k) {
    _tile_loadd(4, x + k * DEPTH, bytes);
    _tile_loadd(6, w + k * TILE_SIZE, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (column_tiles == 2) {
      _tile_loadd(7, w + w_stride + k * TILE_SIZE, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (row_tiles == 2) {
      _tile_loadd(5, x + TILE * stride + k * DEPTH, bytes);
      _tile_dpbf16ps(2, 5, 6);
      if (column_tiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c[0][0], 64);
  if (column_tiles == 2) _tile_stored(1, c[0][1], 64);
  if (row_tiles == 2) {
    _tile_stored(2, c[1][0], 64);
    if (column_tiles == 2) _tile_stored(3, c[1][1], 64);
  }
}

template <int ROWS>
void rows_avx512(const bf16 *x, int64_t stride, const bf16 *w, int64_t depth, float *c) {
  __m512 sum[ROWS];
  for (auto &s : sum) s = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < depth * DEPTH / 2; ++pair) {
    const __m512bh weights = (__m512bh)_mm512_loadu_si512(w + pair * 2 * TILE);
    for (int r = 0; r < ROWS; ++r) {
      int32_t two;
      std::memcpy(&two, x + r * stride + pair * 2, 4);
      sum[r] = _mm512_dpbf16_ps(sum[r], weights, (__m512bh)_mm512_set1_epi32(two));
    }
  }
  for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(c + r * TILE, sum[r]);
}

// The same on processors without AMX; num_rows saves work, it changes no sum.
void tiles_avx512(const bf16 *x, int64_t stride, int64_t num_rows, const bf16 *w, int64_t w_stride,
                  int column_tiles, int64_t depth, float c[2][2][TILE * TILE]) {
  for (int64_t row = 0; row < num_rows; row += 4)
    for (int j = 0; j < column_tiles; ++j) {
      const bf16 *from = x + row * stride, *block = w + j * w_stride;
      float *to = c[row / TILE][j] + row % TILE * TILE;
      if (num_rows - row >= 4) rows_avx512<4>(from, stride, block, depth, to);
      else if (num_rows - row == 1) rows_avx512<1>(from, stride, block, depth, to);
      else if (num_rows - row == 2) rows_avx512<2>(from, stride, block, depth, to);
      else rows_avx512<3>(from, stride, block, depth, to);
    }
}

// For each pair of column blocks in the share and each 32 rows: use(row, num_rows, block, C).
// X has its rows padded to a multiple of 16 with whatever; blocks come in pairs where `paired`.
template <typename Use>
void product(const Config &config, const bf16 *x, int64_t num_rows, int64_t depth_k,
             const bf16 *w, Share blocks, Use use) {
  alignas(64) float c[2][2][TILE * TILE];
  const int64_t depth = depth_k / DEPTH, w_stride = depth * TILE_SIZE;
  for (int64_t b = blocks.begin; b < blocks.end; b += 2) {
    const int columns = std::min<int64_t>(2, blocks.end - b);
    for (int64_t row = 0; row < num_rows; row += 2 * TILE) {
      const int64_t rows = std::min<int64_t>(2 * TILE, num_rows - row);
      const bf16 *from = x + row * depth_k, *block = w + b * w_stride;
      if (config.use_amx)
        tiles_amx(from, depth_k, rows > TILE ? 2 : 1, block, w_stride, columns, depth, c);
      else
        tiles_avx512(from, depth_k, rows, block, w_stride, columns, depth, c);
      for (int64_t r = 0; r < rows; ++r)
        for (int j = 0; j < columns; ++j)
          use(row + r, b + j, j, c[r / TILE], r % TILE * TILE);
    }
  }
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

void rms_norm(const float *x, const float *weight, int64_t n, float epsilon, bf16 *out) {
  const float factor = 1.0f / std::sqrt(mean_square(x, n) + epsilon);
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(x[i] * factor * weight[i]);
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

// -- attention ----------------------------------------------------------------------------

// A softmax over some positions: sum of exp(score - highest), and that sum weighted with V.
struct Partial {
  float highest = -INFINITY, mass = 0.0f;
  alignas(64) float value[MAX_HEAD_DIM];

  void clear(int64_t dim) {
    highest = -INFINITY, mass = 0.0f;
    std::fill_n(value, dim, 0.0f);
  }
  void merge(const Partial &other, int64_t dim) {
    if (other.mass == 0.0f) return;
    const float top = std::max(highest, other.highest);
    const float mine = mass == 0.0f ? 0.0f : exp1(highest - top), its = exp1(other.highest - top);
    for (int64_t i = 0; i < dim; ++i) value[i] = value[i] * mine + other.value[i] * its;
    mass = mass * mine + other.mass * its;
    highest = top;
  }
};

int64_t padded_dim(const Config &c) { return (c.head_dim + DEPTH - 1) / DEPTH * DEPTH; }

// Up to 16 queries of one sequence that read the same KV head, against one chunk of positions.
struct Unit {
  int64_t sequence, kv_head, first_row, num_rows;
};

void attend_chunk(const Config &c, const Layer &layer, const Batch &batch, const Unit &unit,
                  const bf16 *queries, int64_t chunk, Partial *partials) {
  alignas(64) float scores[TILE][CHUNK], tile[2][2][TILE * TILE];
  const int64_t dim = padded_dim(c), groups = c.num_heads / c.num_kv_heads;
  const int64_t num = unit.num_rows * groups, begin = chunk * CHUNK;
  const int64_t *table = batch.block_table + unit.sequence * batch.table_width;
  const int64_t last = batch.positions[unit.first_row + unit.num_rows - 1];
  const int64_t end = std::min(begin + CHUNK, last + 1);
  auto group_of = [&](int64_t position) {  // sixteen slots of one KV head, in both pools
    const int64_t slot = table[position / c.block_size] * c.block_size + position % c.block_size;
    return (slot / TILE * c.num_kv_heads + unit.kv_head) * dim * TILE;
  };
  for (int64_t p = begin; p < end; p += TILE) {
    const bf16 *keys = layer.keys + group_of(p);
    if (c.use_amx) tiles_amx(queries, dim, 1, keys, 0, 1, dim / DEPTH, tile);
    else tiles_avx512(queries, dim, num, keys, 0, 1, dim / DEPTH, tile);
    for (int64_t q = 0; q < num; ++q)
      _mm512_store_ps(scores[q] + p - begin, _mm512_load_ps(tile[0][0] + q * TILE));
  }
  for (int64_t q = 0; q < num; ++q) {
    const int64_t position = batch.positions[unit.first_row + q / groups];
    const int64_t from = std::max(begin, layer.window ? position + 1 - layer.window : 0);
    const int64_t until = std::min(end, position + 1);
    Partial &partial = partials[q];
    partial.clear(dim);
    if (from >= until) continue;
    float *score = scores[q];
    // Positions outside are never looked at: what lies there may be anything.
    std::fill(score, score + (from - begin), -INFINITY);
    std::fill(score + (until - begin), score + (until - begin + TILE - 1) / TILE * TILE, -INFINITY);
    const int64_t first = (from - begin) / TILE * TILE, stop = until - begin;
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t i = first; i < stop; i += TILE) top = _mm512_max_ps(top, _mm512_load_ps(score + i));
    const float highest = _mm512_reduce_max_ps(top);
    __m512 mass = _mm512_setzero_ps();
    for (int64_t i = first; i < stop; i += TILE) {
      const __m512 s = _mm512_load_ps(score + i);
      __m512 e = exp512(_mm512_mul_ps(_mm512_sub_ps(s, _mm512_set1_ps(highest)),
                                      _mm512_set1_ps(c.scale)));
      e = _mm512_mask_mov_ps(e, _mm512_cmp_ps_mask(s, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ),
                             _mm512_setzero_ps());
      _mm512_store_ps(score + i, e);
      mass = _mm512_add_ps(mass, e);
    }
    partial.highest = highest * c.scale;
    partial.mass = _mm512_reduce_add_ps(mass);
  }
  // Sixteen slots at a time, so that V is read once for all queries.
  for (int64_t p = begin; p < end; p += TILE) {
    const bf16 *values = layer.values + group_of(p);
    for (int64_t q = 0; q < num; ++q) {
      const int64_t position = batch.positions[unit.first_row + q / groups];
      const int64_t from = std::max(p, layer.window ? position + 1 - layer.window : 0);
      const int64_t until = std::min({p + TILE, end, position + 1});
      float *value = partials[q].value;
      for (int64_t d = 0; d < dim && from < until; d += 32) {
        __m512 low = _mm512_load_ps(value + d), high = _mm512_load_ps(value + d + 16);
        for (int64_t i = from; i < until; ++i) {
          const __m512 weight = _mm512_set1_ps(scores[q][i - begin]);
          const bf16 *v = values + (i - p) * dim + d;
          low = _mm512_fmadd_ps(weight, load_bf16(v), low);
          high = _mm512_fmadd_ps(weight, load_bf16(v + 16), high);
        }
        _mm512_store_ps(value + d, low), _mm512_store_ps(value + d + 16, high);
      }
    }
  }
}

// -- the step -----------------------------------------------------------------------------

struct Buffers {
  std::vector<float> x, wide, partials;
  std::vector<bf16> normed, queries, attended, gated;
  std::vector<Unit> units;
};

struct Model {
  Config config;
  std::vector<Layer> layers;
  Buffers buffers;
};

// Splits the batch's rows into units of up to 16 queries.
void make_units(const Config &c, const Batch &batch, std::vector<Unit> &units) {
  const int64_t rows = std::max<int64_t>(1, TILE / (c.num_heads / c.num_kv_heads));
  units.clear();
  for (int64_t s = 0; s < batch.num_sequences; ++s)
    for (int64_t r = batch.query_start[s]; r < batch.query_start[s + 1]; r += rows)
      for (int64_t h = 0; h < c.num_kv_heads; ++h)
        units.push_back({s, h, r, std::min(rows, batch.query_start[s + 1] - r)});
}

class Step {
 public:
  Step(Model &model, const Batch &batch, Barrier &barrier, int thread)
      : c_(model.config), b_(model.buffers), batch_(batch), barrier_(barrier), thread_(thread),
        dim_(padded_dim(c_)), width_((c_.num_heads + 2 * c_.num_kv_heads) * c_.head_dim) {}

  void run(const std::vector<Layer> &layers) {
    embed();
    for (const Layer &layer : layers) {
      norm(layer.input_norm);
      project(layer);
      write_cache(layer);
      attend(layer);
      add_product(b_.attended.data(), c_.num_heads * c_.head_dim, layer.out);
      norm(layer.post_norm);
      gate(layer);
      add_product(b_.gated.data(), c_.intermediate, layer.down);
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
      rms_norm(&b_.x[r * c_.hidden], weight, c_.hidden, c_.epsilon, &b_.normed[r * c_.hidden]);
    barrier_.wait();
  }

  void project(const Layer &layer) {
    product(c_, b_.normed.data(), batch_.num_rows, c_.hidden, layer.qkv, blocks(width_),
            [&](int64_t row, int64_t block, int j, float(*t)[TILE * TILE], int64_t at) {
              const int64_t n = std::min<int64_t>(TILE, width_ - block * TILE);
              for (int64_t i = 0; i < n; ++i)
                b_.wide[row * width_ + block * TILE + i] =
                    t[j][at + i] + (layer.qkv_bias ? layer.qkv_bias[block * TILE + i] : 0.0f);
            });
    barrier_.wait();
  }

  void write_cache(const Layer &layer) {
    const Share rows = share(batch_.num_rows);
    const int64_t d = c_.head_dim, groups = c_.num_heads / c_.num_kv_heads;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      float *row = &b_.wide[r * width_];
      const int64_t position = batch_.positions[r], slot = batch_.slots[r];
      for (int64_t h = 0; h < c_.num_heads; ++h) {
        turn(row + h * d, layer.q_norm, c_, position);
        // Queries of one KV head lie together: [kv head][row][group], as units read them.
        bf16 *q = &b_.queries[((h / groups * batch_.num_rows + r) * groups + h % groups) * dim_];
        for (int64_t i = 0; i < d; ++i) q[i] = to_bf16(row[h * d + i]);
      }
      for (int64_t h = 0; h < c_.num_kv_heads; ++h) {
        float *k = row + (c_.num_heads + h) * d, *v = row + (c_.num_heads + c_.num_kv_heads + h) * d;
        turn(k, layer.k_norm, c_, position);
        const int64_t group = (slot / TILE * c_.num_kv_heads + h) * dim_ * TILE;
        bf16 *keys = layer.keys + group + slot % TILE * 2;
        bf16 *values = layer.values + group + slot % TILE * dim_;
        for (int64_t i = 0; i < d; ++i) {
          keys[i / 2 * 2 * TILE + i % 2] = to_bf16(k[i]);
          values[i] = to_bf16(v[i]);
        }
      }
    }
    barrier_.wait();
  }

  // Units of few rows over long contexts are split by chunks; either way chunks are merged in
  // order by the same function, so the sums are the same.
  void attend(const Layer &layer) {
    const int64_t num_units = b_.units.size();
    Partial partials[TILE], sums[TILE];
    const Share units = share(num_units);
    for (int64_t u = units.begin; u < units.end; ++u) {
      const Unit &unit = b_.units[u];
      const int64_t groups = c_.num_heads / c_.num_kv_heads, num = unit.num_rows * groups;
      const bf16 *queries =
          &b_.queries[(unit.kv_head * batch_.num_rows + unit.first_row) * groups * dim_];
      const int64_t last = batch_.positions[unit.first_row + unit.num_rows - 1];
      const int64_t first = batch_.positions[unit.first_row];
      const int64_t begin = layer.window ? std::max<int64_t>(0, first + 1 - layer.window) : 0;
      for (int64_t q = 0; q < num; ++q) sums[q].clear(dim_);
      for (int64_t chunk = begin / CHUNK; chunk * CHUNK <= last; ++chunk) {
        attend_chunk(c_, layer, batch_, unit, queries, chunk, partials);
        for (int64_t q = 0; q < num; ++q) sums[q].merge(partials[q], dim_);
      }
      for (int64_t q = 0; q < num; ++q) {
        const int64_t row = unit.first_row + q / groups, head = unit.kv_head * groups + q % groups;
        bf16 *out = &b_.attended[(row * c_.num_heads + head) * c_.head_dim];
        for (int64_t i = 0; i < c_.head_dim; ++i) out[i] = to_bf16(sums[q].value[i] / sums[q].mass);
      }
    }
    barrier_.wait();
  }

  void add_product(const bf16 *x, int64_t depth, const bf16 *w) {
    product(c_, x, batch_.num_rows, depth, w, blocks(c_.hidden),
            [&](int64_t row, int64_t block, int j, float(*t)[TILE * TILE], int64_t at) {
              float *to = &b_.x[row * c_.hidden + block * TILE];
              _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(t[j] + at)));
            });
    barrier_.wait();
  }

  void gate(const Layer &layer) {
    product(c_, b_.normed.data(), batch_.num_rows, c_.hidden, layer.gate_up,
            blocks(2 * c_.intermediate),
            [&](int64_t row, int64_t block, int j, float(*t)[TILE * TILE], int64_t at) {
              if (j == 0) return;
              const __m512 g = _mm512_load_ps(t[0] + at), u = _mm512_load_ps(t[1] + at);
              const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), g));
              const __m512 y = _mm512_mul_ps(
                  u, _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e)));
              _mm256_storeu_si256(
                  reinterpret_cast<__m256i *>(&b_.gated[row * c_.intermediate + block / 2 * TILE]),
                  (__m256i)_mm512_cvtneps_pbh(y));
            });
    barrier_.wait();
  }

  void logits() {
    const Share rows = share(batch_.num_logits);
    for (int64_t r = rows.begin; r < rows.end; ++r)
      rms_norm(&b_.x[batch_.logit_rows[r] * c_.hidden], c_.final_norm, c_.hidden, c_.epsilon,
               &b_.normed[r * c_.hidden]);
    barrier_.wait();
    product(c_, b_.normed.data(), batch_.num_logits, c_.hidden, c_.lm_head, blocks(c_.vocab),
            [&](int64_t row, int64_t block, int j, float(*t)[TILE * TILE], int64_t at) {
              const int64_t n = std::min<int64_t>(TILE, c_.vocab - block * TILE);
              std::copy_n(t[j] + at, n, batch_.logits + row * c_.vocab + block * TILE);
            });
    barrier_.wait();
  }

  const Config &c_;
  Buffers &b_;
  const Batch &batch_;
  Barrier &barrier_;
  const int thread_;
  const int64_t dim_, width_;
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

// argmax_v(log_w[v] + G_v), with logarithms of the noise only where it can win: from
// -log u >= 1 - u follows G <= -log(1 - u), so v can't beat a score s if exp(log_w - s) < 1 - u.
int64_t choose(uint64_t stream, const float *log_w, int64_t n) {
  int64_t best = std::max_element(log_w, log_w + n) - log_w;
  double score = log_w[best] + gumbel(noise_bits(stream, best));
  constexpr float kSlack = 1.0f - 1e-4f;  // far more than float32's rounding
  alignas(64) float gap[16], weight[16];
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t m = std::min<int64_t>(16, n - i);
    for (int64_t j = 0; j < 16; ++j)  // 1 - u, vectorised by the compiler
      gap[j] = static_cast<float>(0x1p52 - noise_bits(stream, i + j)) * 0x1p-52f * kSlack;
    const __m512 w = _mm512_maskz_loadu_ps((1u << m) - 1, log_w + i);
    _mm512_store_ps(weight, exp512(_mm512_sub_ps(w, _mm512_set1_ps(static_cast<float>(score)))));
    unsigned may_win = _mm512_cmp_ps_mask(_mm512_load_ps(weight), _mm512_load_ps(gap), _CMP_GE_OQ);
    for (may_win &= (1u << m) - 1; may_win; may_win &= may_win - 1) {
      const int64_t v = i + __builtin_ctz(may_win);
      const double mine = log_w[v] + gumbel(noise_bits(stream, v));
      if (mine > score || (mine == score && v < best)) score = mine, best = v;
    }
  }
  return best;
}

}  // namespace

extern "C" {

// choose() for each of num_rows rows of log_w [num_rows, n].
void tandem_choose(const int64_t *streams, const float *log_w, int64_t num_rows, int64_t n,
                   int64_t *chosen) {
  for (int64_t r = 0; r < num_rows; ++r) chosen[r] = choose(streams[r], log_w + r * n, n);
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
  make_units(model.config, *batch, model.buffers.units);
  Barrier barrier(model.config.num_threads);
#pragma omp parallel num_threads(model.config.num_threads)
  {
    TileConfig tiles;
    if (model.config.use_amx) _tile_loadconfig(&tiles);
    Step(model, *batch, barrier, omp_get_thread_num()).run(model.layers);
    if (model.config.use_amx) _tile_release();
  }
}
}
