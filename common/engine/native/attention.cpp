// Attention over a paged KV cache on CPU, for any model: bfloat16, float16 or float32 storage,
// float32 sums. Plain C++ with the vector types of GCC and Clang, for any processor they know.
//
// Row invariance. A row's result is the same bits whatever else is in the batch, however many
// threads run and however its prompt was cut: a score sums over the head's dimensions in order,
// a sum over positions goes in order within chunks of CHUNK positions, counted from position 0,
// and chunks are merged in order.
//
// Layouts. Keys of one block and KV head lie as [D][slot], so that a vector holds one dimension
// of neighbouring positions; in bfloat16 as [D/2][slot][2], which a shift and a mask take apart.
// Values are rows, [slot][D_v]. D is padded to 2, D_v to VALUE_PAD.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "numbers.h"

namespace {

// What registers hold at once.
constexpr int MAX_QUERIES = W == 16 ? 8 : 4, VALUE_PAIRS = W == 16 ? 2 : 1;
constexpr int CHUNK = 256;          // positions of one partial sum
constexpr int UNIT_QUERIES = 32;    // queries that go over the keys together, if there are so many
constexpr int VALUE_PAD = 32;       // as in cpu.py
constexpr int UNITS_PER_THREAD = 4; // fewer are split by chunks

struct Call {  // as in cpu.py
  int64_t kind;  // 0 bfloat16, 1 float16, 2 float32
  int64_t num_rows, num_sequences, table_width, num_heads, num_kv_heads, head_dim, value_dim;
  int64_t block_size, num_threads;
  int64_t window;        // positions a row sees, its own included; 0: all
  float scale, softcap;  // softcap 0: none
  const void *q, *k, *v;
  void *keys, *values, *out;                                // pools; [M, H, D_v]
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;      // strides
  const int64_t *slots, *query_start, *context_len, *block_table;

  int64_t groups() const { return num_heads / num_kv_heads; }
  int64_t key_dim() const { return (head_dim + 1) / 2 * 2; }
  int64_t value_len() const { return (value_dim + VALUE_PAD - 1) / VALUE_PAD * VALUE_PAD; }
};

// -- one chunk ----------------------------------------------------------------------------

struct Unit {  // neighbouring rows of one sequence, and all query heads that read one KV head
  int64_t sequence, kv_head, first_row, num_rows;
};

struct Partial {  // of one query over some positions
  float highest, mass;
  bool empty;
};

struct Range {
  int64_t from, until;
};

// What one thread needs for a unit.
struct Scratch {
  std::vector<float> queries;   // [queries][key_dim], scaled
  std::vector<float> scores;    // [queries][CHUNK]
  std::vector<char> gathered;   // keys of 2 W positions
  std::vector<Range> ranges;    // [queries] what each sees of the chunk
};

template <int N> struct Count {
  static constexpr int value = N;
};

// f(count, first): all queries, as many at a time as registers hold.
template <typename F> inline void by_queries(int64_t num, F f) {
  for (int64_t q = 0; q < num;) {
    const int64_t left = num - q;
    if (MAX_QUERIES >= 8 && left >= 8) f(Count<8>{}, q), q += 8;
    else if (left >= 4) f(Count<4>{}, q), q += 4;
    else if (left == 3) f(Count<3>{}, q), q += 3;
    else if (left == 2) f(Count<2>{}, q), q += 2;
    else f(Count<1>{}, q), q += 1;
  }
}

template <typename T> class Attention {
 public:
  explicit Attention(const Call &c)
      : c_(c), keys_(static_cast<T *>(c.keys)), values_(static_cast<T *>(c.values)),
        key_dim_(c.key_dim()), value_len_(c.value_len()), groups_(c.groups()) {}

  void write_row(int64_t row) const {
    const int64_t size = c_.block_size, block = c_.slots[row] / size, slot = c_.slots[row] % size;
    for (int64_t h = 0; h < c_.num_kv_heads; ++h) {
      const T *k = static_cast<const T *>(c_.k) + row * c_.k_row + h * c_.k_head;
      const T *v = static_cast<const T *>(c_.v) + row * c_.v_row + h * c_.v_head;
      T *key = keys_ + (block * c_.num_kv_heads + h) * key_dim_ * size + slot * PAIRED<T>;
      for (int64_t d = 0; d < c_.head_dim; ++d)
        key[d / PAIRED<T> * PAIRED<T> * size + d % PAIRED<T>] = k[d];
      std::copy_n(v, c_.value_dim,
                  values_ + ((block * c_.num_kv_heads + h) * size + slot) * value_len_);
    }
  }

  void take_queries(const Unit &u, Scratch &s) const {
    const int64_t num = u.num_rows * groups_;
    s.queries.assign(num * key_dim_, 0.0f);
    s.scores.resize(num * CHUNK);
    s.ranges.resize(num);
    for (int64_t i = 0; i < num; ++i) {
      const T *q = static_cast<const T *>(c_.q) + (u.first_row + i / groups_) * c_.q_row +
                   (u.kv_head * groups_ + i % groups_) * c_.q_head;
      for (int64_t d = 0; d < c_.head_dim; ++d)
        s.queries[i * key_dim_ + d] = to_float(q[d]) * c_.scale;
    }
  }

  // What the unit's queries see of one chunk. partials [queries], sums [queries][value_len]
  void chunk(const Unit &u, int64_t index, Scratch &s, Partial *partials, float *sums) const {
    const int64_t num = u.num_rows * groups_, begin = index * CHUNK;
    for (int64_t i = 0; i < num; ++i) {
      const int64_t at = position(u, u.first_row + i / groups_);
      const int64_t from = c_.window ? std::max<int64_t>(begin, at + 1 - c_.window) : begin;
      s.ranges[i] = {std::min(from, begin + CHUNK), std::min(at + 1, begin + CHUNK)};
    }
    const int64_t first = s.ranges[0].from, end = s.ranges[num - 1].until;
    score(u, s, num, begin, begin + (first - begin) / (2 * W) * (2 * W), end);
    for (int64_t i = 0; i < num; ++i)
      partials[i] = soften(&s.scores[i * CHUNK], s.ranges[i].from - begin,
                           s.ranges[i].until - begin);
    std::fill_n(sums, num * value_len_, 0.0f);
    by_queries(num, [&](auto count, int64_t q) {
      weigh<decltype(count)::value>(u, s, begin, q, sums + q * value_len_);
    });
  }

  void merge(int64_t num, const Partial *p, const float *more, Partial *total, float *sums) const {
    for (int64_t i = 0; i < num; ++i, more += value_len_, sums += value_len_) {
      if (p[i].empty) continue;
      if (total[i].empty) {
        total[i] = p[i];
        std::copy_n(more, value_len_, sums);
        continue;
      }
      const float highest = std::max(p[i].highest, total[i].highest);
      const float a = exponential1(total[i].highest - highest);
      const float b = exponential1(p[i].highest - highest);
      total[i] = {highest, total[i].mass * a + p[i].mass * b, false};
      for (int64_t d = 0; d < value_len_; d += W)
        store(sums + d, load<Vec>(sums + d) * a + load<Vec>(more + d) * b);
    }
  }

  void finish(const Unit &u, const Partial *total, const float *sums) const {
    for (int64_t i = 0; i < u.num_rows * groups_; ++i) {
      T *out = static_cast<T *>(c_.out) + ((u.first_row + i / groups_) * c_.num_heads +
                                           u.kv_head * groups_ + i % groups_) * c_.value_dim;
      for (int64_t d = 0; d < c_.value_dim; ++d)
        put(out + d, sums[i * value_len_ + place<T>(d)] / total[i].mass);
    }
  }

  // The chunks that any row of the unit sees: the first and the one behind the last.
  Range chunks(const Unit &u) const {
    const int64_t first = position(u, u.first_row);
    const int64_t last = position(u, u.first_row + u.num_rows - 1);
    const int64_t from = c_.window ? std::max<int64_t>(0, first + 1 - c_.window) : 0;
    return {from / CHUNK, last / CHUNK + 1};
  }

 private:
  int64_t position(const Unit &u, int64_t row) const {
    return c_.context_len[u.sequence] - (c_.query_start[u.sequence + 1] - row);
  }
  int64_t block_of(const Unit &u, int64_t p) const {  // a block's place in the pools
    return c_.block_table[u.sequence * c_.table_width + p / c_.block_size] * c_.num_kv_heads +
           u.kv_head;
  }

  // Scores of all positions from `from`, a multiple of 2 W, to `end`, and of some beyond.
  void score(const Unit &u, Scratch &s, int64_t num, int64_t begin, int64_t from,
             int64_t end) const {
    s.gathered.resize(2 * W * key_dim_ * sizeof(T));
    const bool whole = c_.block_size % W == 0;
    const int64_t stride = whole ? c_.block_size : W;
    for (int64_t p = from; p < end; p += 2 * W) {
      const T *keys[2], *values[2];  // of W positions each
      for (int v = 0; v < 2; ++v) {
        const int64_t at = p + v * W < end ? p + v * W : p;  // nobody reads what is beyond
        T *gathered = reinterpret_cast<T *>(s.gathered.data()) + v * W * key_dim_;
        keys[v] = whole ? keys_ + block_of(u, at) * key_dim_ * stride +
                              at % c_.block_size * PAIRED<T>
                        : gather(u, at, end, gathered);
        values[v] = values_ + (block_of(u, at) * c_.block_size + at % c_.block_size) * value_len_;
      }
      by_queries(num, [&](auto count, int64_t q) {
        products<decltype(count)::value>(&s.queries[q * key_dim_], keys, stride, values,
                                         &s.scores[q * CHUNK + p - begin]);
      });
    }
  }

  // W positions that lie in several blocks.
  const T *gather(const Unit &u, int64_t p, int64_t end, T *to) const {
    constexpr int N = PAIRED<T>;
    std::memset(static_cast<void *>(to), 0, W * key_dim_ * sizeof(T));
    for (int64_t i = 0; i < W && p + i < end; ++i) {
      const int64_t size = c_.block_size, slot = (p + i) % size;
      const T *from = keys_ + block_of(u, p + i) * key_dim_ * size + slot * N;
      for (int64_t d = 0; d < key_dim_; ++d)
        to[d / N * N * W + i * N + d % N] = from[d / N * N * size + d % N];
    }
    return to;
  }

  template <int N>
  void products(const float *queries, const T *const keys[2], int64_t stride,
                const T *const values[2], float *out) const {
    Vec sum[N][2] = {};
    for (int64_t d = 0; d < key_dim_; d += 2)
      for (int v = 0; v < 2; ++v) {
        Vec a, b;
        load_keys(keys[v] + d * stride, stride, a, b);
        __builtin_prefetch(values[v] + d * W, 0, 2);  // their turn comes next
        for (int q = 0; q < N; ++q) sum[q][v] += queries[q * key_dim_ + d] * a;
        for (int q = 0; q < N; ++q) sum[q][v] += queries[q * key_dim_ + d + 1] * b;
      }
    for (int q = 0; q < N; ++q)
      for (int v = 0; v < 2; ++v) store(out + q * CHUNK + v * W, sum[q][v]);
  }

  // Scores to weights, of which the highest is 1. What is outside is never looked at.
  Partial soften(float *score, int64_t from, int64_t until) const {
    if (from >= until) return {0.0f, 0.0f, true};
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const int64_t first = from / W * W, stop = (until + W - 1) / W * W;
    if (c_.softcap != 0.0f)
      for (int64_t i = first; i < stop; i += W)
        store(score + i, cap(load<Vec>(score + i), c_.softcap));
    std::fill(score + first, score + from, kNone);
    std::fill(score + until, score + stop, kNone);
    Vec top = fill(kNone), mass = {};
    for (int64_t i = first; i < stop; i += W) {
      const Vec x = load<Vec>(score + i);
      const Bits higher = (Bits)(x > top);
      top = cast<Vec>((cast<Bits>(x) & higher) | (cast<Bits>(top) & ~higher));
    }
    float highest = top[0], total = 0.0f;
    for (int i = 1; i < W; ++i) highest = std::max(highest, top[i]);
    for (int64_t i = first; i < stop; i += W) {
      const Vec weight = exponential(load<Vec>(score + i) - highest);
      store(score + i, weight);
      mass += weight;
    }
    for (int i = 0; i < W; ++i) total += mass[i];
    return {highest, total, false};
  }

  // sums [N][value_len] += weights * values. Positions that all N queries see are read once for
  // all; each goes alone over the others, since 0 * NaN of a row that it doesn't see is NaN.
  template <int N>
  void weigh(const Unit &u, const Scratch &s, int64_t begin, int64_t q, float *sums) const {
    const Range *seen = &s.ranges[q];
    Range all = seen[0];
    for (int i = 1; i < N; ++i) {
      all.from = std::max(all.from, seen[i].from);
      all.until = std::min(all.until, seen[i].until);
    }
    all.until = std::max(all.from, all.until);
    const float *weights = &s.scores[q * CHUNK];
    for (int i = 0; i < N; ++i)
      strips<1>(u, {seen[i].from, std::min(all.from, seen[i].until)}, begin, weights + i * CHUNK,
                sums + i * value_len_);
    strips<N>(u, all, begin, weights, sums);
    for (int i = 0; i < N; ++i)
      strips<1>(u, {all.until, seen[i].until}, begin, weights + i * CHUNK, sums + i * value_len_);
  }

  template <int N>
  void strips(const Unit &u, Range range, int64_t begin, const float *weights, float *sums) const {
    if (range.from >= range.until) return;
    constexpr int PAIRS = N > 4 ? 1 : VALUE_PAIRS;
    int64_t d = 0;
    for (; d + PAIRS * 2 * W <= value_len_; d += PAIRS * 2 * W)
      strip<N, PAIRS>(u, range, begin, weights, d, sums + d);
    for (; d < value_len_; d += 2 * W) strip<N, 1>(u, range, begin, weights, d, sums + d);
  }

  template <int N, int PAIRS>
  void strip(const Unit &u, Range range, int64_t begin, const float *weights, int64_t d,
             float *sums) const {
    Vec sum[N][2 * PAIRS];
    for (int q = 0; q < N; ++q)
      for (int j = 0; j < 2 * PAIRS; ++j) sum[q][j] = load<Vec>(sums + q * value_len_ + j * W);
    for (int64_t p = range.from; p < range.until;) {
      const int64_t slot = p % c_.block_size;
      const int64_t stop = std::min(range.until, p - slot + c_.block_size);
      const T *value = values_ + (block_of(u, p) * c_.block_size + slot) * value_len_ + d;
      // Memory is kept busy with the next chunk's keys meanwhile.
      const int64_t next = std::min(p + CHUNK, c_.context_len[u.sequence] - 1);
      const T *ahead = keys_ + (block_of(u, next) * c_.block_size + slot) * key_dim_ + d;
      for (; p < stop; ++p, value += value_len_, ahead += key_dim_)
        for (int j = 0; j < PAIRS; ++j) {
          Vec a, b;
          load_values(value + j * 2 * W, a, b);
          __builtin_prefetch(ahead + j * 2 * W, 0, 2);
          for (int q = 0; q < N; ++q) {
            const float weight = weights[q * CHUNK + p - begin];
            sum[q][2 * j] += weight * a, sum[q][2 * j + 1] += weight * b;
          }
        }
    }
    for (int q = 0; q < N; ++q)
      for (int j = 0; j < 2 * PAIRS; ++j) store(sums + q * value_len_ + j * W, sum[q][j]);
  }

  const Call &c_;
  T *const keys_, *const values_;
  const int64_t key_dim_, value_len_, groups_;
};

// -- all of them --------------------------------------------------------------------------

std::vector<Unit> make_units(const Call &c) {
  const int64_t rows = std::max<int64_t>(1, UNIT_QUERIES / c.groups());
  std::vector<Unit> units;
  for (int64_t s = 0; s < c.num_sequences; ++s)
    for (int64_t r = c.query_start[s]; r < c.query_start[s + 1]; r += rows)
      for (int64_t h = 0; h < c.num_kv_heads; ++h)
        units.push_back({s, h, r, std::min(rows, c.query_start[s + 1] - r)});
  return units;
}

// One thread takes a unit, chunk after chunk.
template <typename T>
void by_unit(const Call &c, const Attention<T> &attention, const std::vector<Unit> &units) {
#pragma omp parallel num_threads(c.num_threads)
  {
    Scratch scratch;
    std::vector<Partial> partials, total;
    std::vector<float> more, sums;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < units.size(); ++i) {
      const int64_t num = units[i].num_rows * c.groups();
      partials.resize(num), total.assign(num, {0.0f, 0.0f, true});
      more.resize(num * c.value_len()), sums.resize(num * c.value_len());
      attention.take_queries(units[i], scratch);
      const Range chunks = attention.chunks(units[i]);
      for (int64_t j = chunks.from; j < chunks.until; ++j) {
        attention.chunk(units[i], j, scratch, partials.data(), more.data());
        attention.merge(num, partials.data(), more.data(), total.data(), sums.data());
      }
      attention.finish(units[i], total.data(), sums.data());
    }
  }
}

// Threads share out the chunks of few units; then they are merged in order: the same sums.
template <typename T>
void by_chunk(const Call &c, const Attention<T> &attention, const std::vector<Unit> &units) {
  struct Item {
    const Unit *unit;
    int64_t chunk;
    std::vector<Partial> partials;
    std::vector<float> sums;
  };
  std::vector<Item> items;
  for (const Unit &unit : units)
    for (int64_t j = attention.chunks(unit).from; j < attention.chunks(unit).until; ++j)
      items.push_back({&unit, j, {}, {}});
#pragma omp parallel num_threads(c.num_threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); ++i) {
      Item &item = items[i];
      const int64_t num = item.unit->num_rows * c.groups();
      item.partials.resize(num), item.sums.resize(num * c.value_len());
      attention.take_queries(*item.unit, scratch);
      attention.chunk(*item.unit, item.chunk, scratch, item.partials.data(), item.sums.data());
    }
  }
  for (size_t i = 0; i < items.size();) {
    Item &total = items[i];
    const Unit *unit = total.unit;
    for (++i; i < items.size() && items[i].unit == unit; ++i)
      attention.merge(unit->num_rows * c.groups(), items[i].partials.data(), items[i].sums.data(),
                      total.partials.data(), total.sums.data());
    attention.finish(*unit, total.partials.data(), total.sums.data());
  }
}

template <typename T> void attend(const Call &c) {
  const Attention<T> attention(c);
#pragma omp parallel for num_threads(c.num_threads) if (c.num_rows >= 64)
  for (int64_t r = 0; r < c.num_rows; ++r) attention.write_row(r);
  const std::vector<Unit> units = make_units(c);
  const int64_t enough = c.num_threads > 1 ? UNITS_PER_THREAD * c.num_threads : 0;
  if (static_cast<int64_t>(units.size()) < enough) by_chunk(c, attention, units);
  else by_unit(c, attention, units);
}

}  // namespace

extern "C" {

void tandem_attend(const Call *call) {
  if (call->kind == 0) attend<Bf16>(*call);
  else if (call->kind == 1) attend<Half>(*call);
  else attend<float>(*call);
}

// Pages as large as the system has them: blocks lie anywhere, so each costs a look-up of its page.
void tandem_advise(void *memory, int64_t num_bytes) {
#ifdef MADV_HUGEPAGE
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + num_bytes;
  if (begin < end) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Reads memory as fast as it comes, for benchmarks. Returns a sum of what is there.
uint64_t tandem_read(const void *memory, int64_t num_bytes, int64_t num_threads) {
  using Line = uint64_t __attribute__((vector_size(4 * W)));
  constexpr int64_t kPiece = 1 << 16;
  uint64_t total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total)
  for (int64_t at = 0; at < num_bytes; at += kPiece) {
    Line sum[4] = {};
    const char *piece = static_cast<const char *>(memory) + at;
    for (int64_t i = 0; i + 16 * W <= std::min(kPiece, num_bytes - at); i += 16 * W)
      for (int j = 0; j < 4; ++j) sum[j] += load<Line>(piece + i + 4 * W * j);
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < W / 2; ++i) total += sum[j][i];
  }
  return total;
}
}
