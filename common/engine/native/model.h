// What Python hands over; the same structures are in __init__.py.
#pragma once
#include "avx512.h"

namespace {

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
  int64_t *likeliest;            // [num_logits] largest() of each row
};

}  // namespace
