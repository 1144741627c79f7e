// Causal attention inside documents of any lengths that lie end to end, for CPUs: forward and backward.
//
// A task is one document and one kv head. Rows (queries) are taken in blocks; a block meets the keys up to its last row in
// tiles, so its scores stay in the cache and are never written to memory. The backward pass makes the weights again from the
// log of the forward pass's sums, as FlashAttention does (Dao et al. 2022), with scores transposed (keys x rows), so that only
// small pieces ever need another layout. Products are oneDNN's through at::native::cpublas::brgemm, in bf16 or fp32, with
// sums in fp32; everything else is plain loops that the compiler vectorises.
//
// Legend: H heads, K kv heads, G = H / K, D head width, L tokens of a document, P = L filled up to STEP, R rows of a block.

#pragma once

#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "numbers.h"

namespace {

using at::native::cpublas::brgemm;
using c10::BFloat16;

constexpr int64_t STEP = 32;                 // few shapes of products, as each is compiled by oneDNN at its first call
constexpr int64_t ROWS = 2 * STEP;           // of a block, at most
constexpr int64_t KEYS = 512;                // of a tile, at most: no length of a document makes products of a new shape
constexpr int64_t COMPILING = 4 << 20;       // bytes to be free: oneDNN crashes where it gets none for a product's code
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

struct Problem {
  int64_t heads, kv_heads, width, documents;
  const int64_t* starts;                     // of the documents, and the end
  const int64_t* order;                      // of the documents, the longest first
  int64_t q_stride, k_stride, v_stride;      // elements from a token to the next; heads lie side by side
  int64_t dq_stride, dk_stride;              // of their gradients, where those of values lie as those of keys
  int64_t window;                            // tokens a row sees, itself included; 0 = all before it
  float scale, dropout;
  uint64_t seed;
  int64_t group() const { return heads / kv_heads; }
};

inline int64_t filled(int64_t length) { return (length + STEP - 1) / STEP * STEP; }
inline int64_t rows_of(int64_t length) { return length > STEP ? ROWS : STEP; }

// a document's tile of keys that `key` is in, filled up to `all` keys
struct Tile {
  Tile(int64_t key, int64_t all) : first(key / KEYS * KEYS), keys(std::min(KEYS, all - first)) {}
  int64_t first, keys;
};

// what lies in each tile of the keys from `low` to `end`: visit(its first key, its keys)
template <typename Visit> void over_tiles(int64_t low, int64_t end, Visit visit) {
  for (int64_t key = low; key < end;) {
    const int64_t next = std::min(end, (key / KEYS + 1) * KEYS);
    visit(key, next - key);
    key = next;
  }
}

// ---------------------------------------------------------------------------------------------- numbers

inline void store(BFloat16& to, float x) { to.x = half_bits(x); }
inline void store(float& to, float x) { to = x; }

template <typename T> void write_row(const float* from, int64_t width, T* to) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) store(to[i], from[i]);
}

// 32 well mixed bits of a counter (Wellons 2018, "lowbias32")
inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352dU;
  x = (x ^ (x >> 15)) * 0x846ca68bU;
  return x ^ (x >> 16);
}
struct Dropping {
  uint32_t least;                            // a weight is kept whose bits are at least this
  float kept;                                // what it is then multiplied by
  uint64_t seed;
  explicit Dropping(const Problem& p)
      : least(uint32_t(double(p.dropout) * 4294967296.0)), kept(1.f / (1.f - p.dropout)), seed(p.seed) {}
  uint32_t row(int64_t token, int64_t head) const {
    return mixed(mixed(uint32_t(token) ^ uint32_t(seed)) + uint32_t(head) * 0x9e3779b9U + uint32_t(seed >> 32));
  }
  float factor(uint32_t row, uint32_t key) const { return mixed(row + key) >= least ? kept : 0.f; }
};

// ---------------------------------------------------------------------------------------------- layouts

template <typename T> constexpr int64_t PAIR = std::is_same_v<T, float> ? 1 : 2;     // of rows that brgemm wants side by side

// `rows` x `width` from memory -> `filled` x `width`, end to end, zeros behind
template <typename T> void copy_rows(const T* from, int64_t stride, int64_t rows, int64_t all, int64_t width, T* to) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * width, from + r * stride, width * sizeof(T));
  std::memset(static_cast<void*>(to + rows * width), 0, (all - rows) * width * sizeof(T));
}

// (rows, columns) end to end -> the right side of a product with rows as its sum
template <typename T> void interleave(const T* from, int64_t rows, int64_t columns, T* to) {
  if constexpr (PAIR<T> == 1) {
    std::memcpy(to, from, rows * columns * sizeof(T));
  } else {
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
    uint32_t* pairs = reinterpret_cast<uint32_t*>(to);
    for (int64_t r = 0; r < rows; r += 2) {
      const uint16_t *a = bits + r * columns, *b = a + columns;
      uint32_t* out = pairs + r / 2 * columns;
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c) out[c] = uint32_t(a[c]) | uint32_t(b[c]) << 16;
    }
  }
}

constexpr int64_t SIDE = 4;                  // words of a vector that every processor has

// a square of SIDE x SIDE words; `columns` words lie between its rows, and `rows` between the rows of the result
inline void transpose_square(const uint32_t* from, int64_t columns, uint32_t* to, int64_t rows) {
#if __has_builtin(__builtin_shufflevector)
  typedef uint32_t Row __attribute__((vector_size(SIDE * 4)));
  Row a, b, c, d;
  std::memcpy(&a, from, sizeof(Row));
  std::memcpy(&b, from + columns, sizeof(Row));
  std::memcpy(&c, from + 2 * columns, sizeof(Row));
  std::memcpy(&d, from + 3 * columns, sizeof(Row));
  const Row ac = __builtin_shufflevector(a, c, 0, 4, 1, 5), bd = __builtin_shufflevector(b, d, 0, 4, 1, 5);
  const Row ac_behind = __builtin_shufflevector(a, c, 2, 6, 3, 7), bd_behind = __builtin_shufflevector(b, d, 2, 6, 3, 7);
  const Row turned[SIDE] = {__builtin_shufflevector(ac, bd, 0, 4, 1, 5), __builtin_shufflevector(ac, bd, 2, 6, 3, 7),
                            __builtin_shufflevector(ac_behind, bd_behind, 0, 4, 1, 5),
                            __builtin_shufflevector(ac_behind, bd_behind, 2, 6, 3, 7)};
  for (int64_t i = 0; i < SIDE; ++i) std::memcpy(to + i * rows, &turned[i], sizeof(Row));
#else
  for (int64_t j = 0; j < SIDE; ++j)
    for (int64_t i = 0; i < SIDE; ++i) to[j * rows + i] = from[i * columns + j];
#endif
}

// (rows, columns) 32-bit words -> (columns, rows)
inline void transpose_words(const uint32_t* from, int64_t rows, int64_t columns, uint32_t* to) {
  const int64_t whole_rows = rows / SIDE * SIDE, whole_columns = columns / SIDE * SIDE;
  constexpr int64_t LINE = 16;               // words: each of the result's cache lines is written at once
  for (int64_t line = 0; line < whole_rows; line += LINE)
    for (int64_t c = 0; c < whole_columns; c += SIDE)
      for (int64_t r = line; r < std::min(whole_rows, line + LINE); r += SIDE)
        transpose_square(from + r * columns + c, columns, to + c * rows + r, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
}

// (rows, columns) end to end -> the right side of a product with columns as its sum: transposed, in pairs
template <typename T> void turn(const T* from, int64_t rows, int64_t columns, T* to) {
  transpose_words(reinterpret_cast<const uint32_t*>(from), rows, columns / PAIR<T>, reinterpret_cast<uint32_t*>(to));
}

// (rows, columns) -> (columns, rows), by way of `pairs`
template <typename T> void transpose(const T* from, int64_t rows, int64_t columns, T* pairs, T* to) {
  if constexpr (PAIR<T> == 1) {
    turn(from, rows, columns, to);
  } else {
    turn(from, rows, columns, pairs);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(pairs);
    uint16_t* out = reinterpret_cast<uint16_t*>(to);
    for (int64_t c = 0; c < columns; c += 2) {
      const uint32_t* word = words + c / 2 * rows;
      uint16_t *a = out + c * rows, *b = a + rows;
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) {
        a[r] = uint16_t(word[r]);
        b[r] = uint16_t(word[r] >> 16);
      }
    }
  }
}

template <typename T> void product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c,
                                   int64_t ldc, bool add) {
  brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, PAIR<T> == 2);
}

// memory that a thread works in
class Scratch {
 public:
  template <typename T> T* take(int64_t count) {
    held_.emplace_back(static_cast<char*>(::operator new[](count * sizeof(T), ALIGNED)));
    return reinterpret_cast<T*>(held_.back().get());
  }

 private:
  static constexpr std::align_val_t ALIGNED{64};
  struct Free {
    void operator()(char* held) const { ::operator delete[](held, ALIGNED); }
  };
  std::vector<std::unique_ptr<char[], Free>> held_;
};

// ---------------------------------------------------------------------------------------------- forward

template <typename T> class Forward {
 public:
  Forward(const Problem& p, int64_t longest) : p_(p), dropping_(p), longest_(filled(longest)) {}

  void run(int64_t document, int64_t kv_head, const T* q, const T* k, const T* v, T* out, float* sums) {
    const int64_t start = p_.starts[document], length = p_.starts[document + 1] - start, width = p_.width;
    const int64_t all = filled(length), rows = rows_of(length);
    copy_rows(k + start * p_.k_stride + kv_head * width, p_.k_stride, length, all, width, together_);
    over_tiles(0, all, [&](int64_t key, int64_t keys) { turn(together_ + key * width, keys, width, keys_ + key * width); });
    copy_rows(v + start * p_.v_stride + kv_head * width, p_.v_stride, length, all, width, together_);
    interleave(together_, all, width, values_);
    for (int64_t head = kv_head * p_.group(); head < (kv_head + 1) * p_.group(); ++head)
      for (int64_t first = 0; first < length; first += rows) {
        const int64_t real = std::min(rows, length - first), last = std::min(all, first + rows);
        const int64_t low = p_.window ? std::max<int64_t>(0, first - p_.window + 1) / STEP * STEP : 0;
        copy_rows(q + (start + first) * p_.q_stride + head * width, p_.q_stride, real, rows, width, rows_);
        over_tiles(low, last, [&](int64_t key, int64_t keys) {
          const Tile tile(key, all);
          product(rows, keys, width, rows_, width, keys_ + tile.first * width + (key - tile.first) * PAIR<T>, tile.keys,
                  scores_ + (key - low) * rows, keys, false);
        });
        for (int64_t r = 0; r < real; ++r)
          sums[(start + first + r) * p_.heads + head] = weigh(start, head, first + r, low, last, r, rows);
        over_tiles(low, last, [&](int64_t key, int64_t keys) {
          T* weights = weights_ + (key - low) * rows;
          std::memset(static_cast<void*>(weights + real * keys), 0, (rows - real) * keys * sizeof(T));
          product(rows, width, keys, weights, keys, values_ + key * width, width, mixed_, width, key > low);
        });
        for (int64_t r = 0; r < real; ++r) {
          T* to = out + ((start + first + r) * p_.heads + head) * width;
          const float* from = mixed_ + r * width;
          const float over = inverse_[r];
#pragma omp simd
          for (int64_t d = 0; d < width; ++d) store(to[d], from[d] * over);
        }
      }
  }

 private:
  // the weights of a row before they are divided by their sum; gives the log of the sum, to base 2
  float weigh(int64_t start, int64_t head, int64_t row, int64_t low, int64_t end, int64_t r, int64_t rows) {
    float most = HIDDEN, sum = 0.f;
    over_tiles(low, end, [&](int64_t key, int64_t keys) {
      float* s = scores_ + (key - low) * rows + r * keys;
      const int64_t from = p_.window ? std::clamp<int64_t>(row - p_.window + 1 - key, 0, keys) : 0;
      std::fill(s, s + from, HIDDEN);
      std::fill(s + std::clamp<int64_t>(row + 1 - key, 0, keys), s + keys, HIDDEN);
#pragma omp simd reduction(max : most)
      for (int64_t j = 0; j < keys; ++j) most = s[j] > most ? s[j] : most;
    });
    const float factor = p_.scale * LOG2E, shift = most * factor;
    const uint32_t counter = p_.dropout > 0.f ? dropping_.row(start + row, head) : 0;
    over_tiles(low, end, [&](int64_t key, int64_t keys) {
      float* s = scores_ + (key - low) * rows + r * keys;
      T* w = weights_ + (key - low) * rows + r * keys;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < keys; ++j) {
        s[j] = power_of_two(s[j] * factor - shift);
        sum += s[j];
      }
      if (p_.dropout > 0.f) {
#pragma omp simd
        for (int64_t j = 0; j < keys; ++j) s[j] *= dropping_.factor(counter, uint32_t(key + j));
      }
#pragma omp simd
      for (int64_t j = 0; j < keys; ++j) store(w[j], s[j]);
    });
    inverse_[r] = 1.f / sum;
    return shift + std::log2(sum);
  }

  const Problem& p_;
  Dropping dropping_;
  int64_t longest_, wide_ = longest_ * p_.width;
  Scratch scratch_;
  T *together_ = scratch_.take<T>(wide_), *keys_ = scratch_.take<T>(wide_), *values_ = scratch_.take<T>(wide_);
  T *rows_ = scratch_.take<T>(ROWS * p_.width), *weights_ = scratch_.take<T>(ROWS * longest_);
  float *scores_ = scratch_.take<float>(ROWS * longest_), *mixed_ = scratch_.take<float>(ROWS * p_.width);
  float inverse_[ROWS];
};

// ---------------------------------------------------------------------------------------------- backward

template <typename T> class Backward {
 public:
  Backward(const Problem& p, int64_t longest) : p_(p), dropping_(p), wide_(filled(longest) * p.width) {}

  void run(int64_t document, int64_t kv_head, const T* outer, const T* q, const T* k, const T* v, const T* out,
           const float* sums, T* dq, T* dk, T* dv) {
    const int64_t start = p_.starts[document], length = p_.starts[document + 1] - start, width = p_.width;
    const int64_t all = filled(length), rows = rows_of(length), out_stride = p_.heads * width;
    copy_rows(k + start * p_.k_stride + kv_head * width, p_.k_stride, length, all, width, keys_);
    over_tiles(0, all, [&](int64_t key, int64_t keys) {
      transpose(keys_ + key * width, keys, width, values_, keys_turned_ + key * width);
    });
    copy_rows(v + start * p_.v_stride + kv_head * width, p_.v_stride, length, all, width, values_);
    std::fill(dkeys_, dkeys_ + all * width, 0.f);
    std::fill(dvalues_, dvalues_ + all * width, 0.f);
    for (int64_t head = kv_head * p_.group(); head < (kv_head + 1) * p_.group(); ++head)
      for (int64_t first = 0; first < length; first += rows) {
        const int64_t real = std::min(rows, length - first), last = std::min(all, first + rows);
        const int64_t low = p_.window ? std::max<int64_t>(0, first - p_.window + 1) / STEP * STEP : 0;
        const int64_t token = start + first;
        copy_rows(outer + token * out_stride + head * width, out_stride, real, rows, width, rows_);
        recall(out + token * out_stride + head * width, out_stride, sums + token * p_.heads + head, token, head, real, rows);
        turn(rows_, rows, width, outer_turned_);
        interleave(rows_, rows, width, outer_);
        copy_rows(q + token * p_.q_stride + head * width, p_.q_stride, real, rows, width, rows_);
        turn(rows_, rows, width, queries_turned_);
        interleave(rows_, rows, width, queries_);
        over_tiles(low, last, [&](int64_t key, int64_t keys) { meet(key, keys, first, rows, Tile(key, all), key > low); });
        transpose_words(reinterpret_cast<uint32_t*>(dqueries_), width, rows, reinterpret_cast<uint32_t*>(dqueries_turned_));
        for (int64_t r = 0; r < real; ++r)
          write_row(dqueries_turned_ + r * width, width, dq + (token + r) * p_.dq_stride + head * width);
      }
    write(dkeys_, length, dk + start * p_.dk_stride + kv_head * width);
    write(dvalues_, length, dv + start * p_.dk_stride + kv_head * width);
  }

 private:
  // of each row: the log of its sum, the product of its result and the result's gradient, and its counter
  void recall(const T* out, int64_t stride, const float* sums, int64_t token, int64_t head, int64_t real, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      float total = 0.f;
      if (r < real)
#pragma omp simd reduction(+ : total)
        for (int64_t d = 0; d < p_.width; ++d) total += float(out[r * stride + d]) * float(rows_[r * p_.width + d]);
      inner_[r] = total;
      logs_[r] = r < real ? sums[r * p_.heads] : -HIDDEN;
      counters_[r] = dropping_.row(token + r, head);
    }
  }

  // `keys` keys from `low` on: what the block's rows give to their gradients, and they to the queries'
  void meet(int64_t low, int64_t keys, int64_t first, int64_t rows, Tile tile, bool add) {
    const int64_t width = p_.width;
    product(keys, rows, width, keys_ + low * width, width, queries_turned_, rows, scores_, rows, false);
    product(keys, rows, width, values_ + low * width, width, outer_turned_, rows, dweights_, rows, false);
    for (int64_t j = 0; j < keys; j += 2)
      if (rows == STEP) differentiate<STEP>(j, low, first); else differentiate<ROWS>(j, low, first);
    product(keys, width, rows, weights_, rows, outer_, width, dvalues_ + low * width, width, true);
    product(keys, width, rows, dscores_, rows, queries_, width, dkeys_ + low * width, width, true);
    const T* turned = keys_turned_ + tile.first * width + low - tile.first;
    product(width, rows, keys, turned, tile.keys, dscores_paired_, rows, dqueries_, rows, add);
  }

  // two keys: their weights in the block's rows, and the gradients of their scores, also side by side
  template <int32_t rows> void differentiate(int64_t j, int64_t low, int64_t first) {
    float made[2][ROWS];
    for (int64_t one = 0; one < 2; ++one) {
      const int64_t key = low + j + one;
      const float *s = scores_ + (j + one) * rows, *dw = dweights_ + (j + one) * rows;
      T *w = weights_ + (j + one) * rows, *ds = dscores_ + (j + one) * rows;
      const int32_t nearest = int32_t(key - first);                                  // the first row of the block that sees it
      const int32_t furthest = p_.window ? int32_t(std::min<int64_t>(nearest + p_.window, 1 << 30)) : 1 << 30;
      const float factor = p_.scale * LOG2E;
      float* made_here = made[one];
      if (p_.dropout > 0.f) {
#pragma omp simd
        for (int32_t r = 0; r < rows; ++r) {
          const float all = power_of_two(s[r] * factor - logs_[r]);
          const float weight = (r >= nearest) & (r < furthest) ? all : 0.f;
          const float keep = dropping_.factor(counters_[r], uint32_t(key));
          store(w[r], weight * keep);
          made_here[r] = weight * (dw[r] * keep - inner_[r]) * p_.scale;
        }
      } else {
#pragma omp simd
        for (int32_t r = 0; r < rows; ++r) {
          const float all = power_of_two(s[r] * factor - logs_[r]);
          const float weight = (r >= nearest) & (r < furthest) ? all : 0.f;
          store(w[r], weight);
          made_here[r] = weight * (dw[r] - inner_[r]) * p_.scale;
        }
      }
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) store(ds[r], made_here[r]);
    }
    if constexpr (PAIR<T> == 2) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(dscores_paired_ + j * rows);
      const uint16_t *a = reinterpret_cast<const uint16_t*>(dscores_ + j * rows), *b = a + rows;
#pragma omp simd
      for (int64_t r = 0; r < rows; ++r) pairs[r] = uint32_t(a[r]) | uint32_t(b[r]) << 16;
    } else {
      std::memcpy(dscores_paired_ + j * rows, dscores_ + j * rows, 2 * rows * sizeof(T));
    }
  }

  void write(const float* from, int64_t length, T* to) {
    for (int64_t r = 0; r < length; ++r) write_row(from + r * p_.width, p_.width, to + r * p_.dk_stride);
  }

  const Problem& p_;
  Dropping dropping_;
  int64_t wide_, rowed_ = ROWS * p_.width;
  Scratch scratch_;
  T *keys_ = scratch_.take<T>(wide_), *values_ = scratch_.take<T>(wide_), *keys_turned_ = scratch_.take<T>(wide_);
  T *rows_ = scratch_.take<T>(rowed_), *queries_ = scratch_.take<T>(rowed_), *queries_turned_ = scratch_.take<T>(rowed_);
  T *outer_ = scratch_.take<T>(rowed_), *outer_turned_ = scratch_.take<T>(rowed_);
  T *weights_ = scratch_.take<T>(ROWS * KEYS), *dscores_ = scratch_.take<T>(ROWS * KEYS);
  T* dscores_paired_ = scratch_.take<T>(ROWS * KEYS);
  float *dkeys_ = scratch_.take<float>(wide_), *dvalues_ = scratch_.take<float>(wide_);
  float *scores_ = scratch_.take<float>(ROWS * KEYS), *dweights_ = scratch_.take<float>(ROWS * KEYS);
  float *dqueries_ = scratch_.take<float>(rowed_), *dqueries_turned_ = scratch_.take<float>(rowed_);
  float inner_[ROWS], logs_[ROWS];
  uint32_t counters_[ROWS];
};

// ---------------------------------------------------------------------------------------------- all tasks

// 0, or 1 where memory ran out: errors must not leave threads, and Python raises them again
template <typename Pass, typename Run> int over_tasks(const Problem& p, Run run) {
  const int64_t longest = p.documents ? p.starts[p.order[0] + 1] - p.starts[p.order[0]] : 0;
  const int64_t tasks = p.documents * p.kv_heads;
  std::atomic<int64_t> next{0};
  std::atomic<int> out_of_memory{0};
#pragma omp parallel
  try {
    Scratch().take<char>(COMPILING);
    Pass pass(p, longest);
    for (int64_t task = next++; task < tasks; task = next++) run(pass, p.order[task / p.kv_heads], task % p.kv_heads);
    at::native::cpublas::brgemm_release();
  } catch (const std::bad_alloc&) {
    out_of_memory = 1;
  }
  return out_of_memory;
}

template <typename T> int forward(const Problem& p, const T* q, const T* k, const T* v, T* out, float* sums) {
  return over_tasks<Forward<T>>(p, [&](Forward<T>& pass, int64_t document, int64_t kv_head) {
    pass.run(document, kv_head, q, k, v, out, sums);
  });
}

template <typename T>
int backward(const Problem& p, const T* outer, const T* q, const T* k, const T* v, const T* out, const float* sums, T* dq,
             T* dk, T* dv) {
  return over_tasks<Backward<T>>(p, [&](Backward<T>& pass, int64_t document, int64_t kv_head) {
    pass.run(document, kv_head, outer, q, k, v, out, sums, dq, dk, dv);
  });
}

}  // namespace
