// A decoder step on CPU: one call runs all layers of a pre-norm transformer (RMSNorm, rotary,
// grouped-query attention over a paged KV cache, gated MLP) in bfloat16 with float32 sums.
//
// Row invariance. A row's result is the same bits whatever else is in the batch and however many
// threads run: every product sums over K in one order, 32 at a time; attention sums over chunks
// of CHUNK positions, counted from position 0, and merges them in order.
//
// Layouts. A weight [N, K] is packed into tiles of 16 n by 32 k, [N/16][K/32][k/2][n][2]: what
// AMX wants as its second operand, and AVX512-BF16 as well; quantised ones are widened to that on
// their way (see quantization.py). Sixteen keys of one KV head are packed just so,
// [D/32][d/2][slot][2], and their values as [D/16][slot/2][d][2]: the weights of positions are then
// the first operand. D is padded to 32.
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "choose.h"
#include "model.h"
#include "products.h"
#include "softmax.h"

namespace {

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

// -- the step -----------------------------------------------------------------------------

struct Buffers {
  std::vector<float> x, wide, partials;
  std::vector<bf16> normed, queries, attended, gated;
  std::vector<Peak> peaks;  // [threads, logit rows]
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
    const int64_t num = batch_.num_logits;
    Peak *mine = b_.peaks.data() + thread_ * num;
    for (int64_t r = 0; r < num; ++r) mine[r].clear();
    auto keep = [&](int64_t row, int64_t block, __m512 sums) {
      const __mmask16 inside = lanes(c_.vocab - block * TILE);
      _mm512_mask_storeu_ps(batch_.logits + row * c_.vocab + block * TILE, inside, sums);
      mine[row].see(inside, sums, block);
    };
    multiply(b_.normed, num, c_.hidden, c_.lm_head, c_.vocab, one_by_one(keep));
    barrier_.wait();
    for (int64_t r = rows.begin; r < rows.end; ++r)
      batch_.likeliest[r] =
          largest(&b_.peaks[r], num, c_.num_threads, batch_.logits + r * c_.vocab, c_.vocab);
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

void make_room(const Config &c, int64_t num_rows, int64_t num_logits, Buffers &b) {
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
  grow(b.peaks, c.num_threads * num_logits);
}

}  // namespace

extern "C" {

// choose() for each of num_rows rows of log_w [num_rows, n]; largest() without streams. largests
// are those of the rows, or null.
void tandem_choose(const int64_t *streams, const int64_t *largests, const float *log_w,
                   int64_t num_rows, int64_t n, int64_t num_threads, int64_t *chosen) {
#pragma omp parallel for num_threads(std::min(num_threads, num_rows))
  for (int64_t r = 0; r < num_rows; ++r) {
    const float *row = log_w + r * n;
    chosen[r] = largests ? largests[r] : largest(row, n);
    if (streams) chosen[r] = choose(streams[r], row, n, chosen[r]);
  }
}

// Whether the kernel lets this process use AMX; asks for it.
int tandem_request_amx() {
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

void *tandem_create(const Config *config, const Layer *layers) {
  Model *model = new Model{*config, std::vector<Layer>(layers, layers + config->num_layers), {}};
  // All of them wait for each other, so there must be as many as are asked for.
  model->config.num_threads = std::min<int64_t>(config->num_threads, omp_get_thread_limit());
  return model;
}

void tandem_destroy(void *model) { delete static_cast<Model *>(model); }

void tandem_forward(void *handle, const Batch *batch) {
  Model &model = *static_cast<Model *>(handle);
  make_room(model.config, batch->num_rows, batch->num_logits, model.buffers);
  make_units(model.config, *batch, model.buffers);
  const bool amx = uses_amx(model.config, batch->num_rows);
  omp_set_dynamic(0);  // no fewer threads than asked for
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
