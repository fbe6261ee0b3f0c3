// Attention softmax(q k^T / sqrt(D) + bias) v: of one new position of each hypothesis to cached keys and values. The
// encoder uses attend_keys for whole sentences.
#pragma once

#include "products.h"

struct Attention {
    Linear input;   // queries, keys and values of self-attention; queries of attention to the source
    Linear output;
    int64_t heads, kv_heads, dim;  // of keys and values, each for heads / kv_heads heads of queries; width of a head
};

struct Rotations {
    const float *cos, *sin;  // D floats for each position (signed sin); null for none
};

struct Keys {
    float* target;              // sentences x kv_heads x capacity x D: keys of the target
    int64_t to_values;          // from a key of the target to its value, in floats
    int64_t capacity;           // slots
    float* source_keys;         // sources x kv_heads x D x S
    float* source_values;       // sources x kv_heads x S x D
    const float* source_bias;   // a row of S for each source, added to the scores; null for none
    int64_t sources, source_length, bias_stride;
};

struct Step {  // a position of each hypothesis
    int64_t sentences, beam, length, threads;
    int64_t past;           // slots of the target's keys in use before this step
    int32_t* seen;          // rows of `stride`, one per hypothesis: the slots of the target's keys that it sees
    int64_t stride;
    int64_t* places;        // of each sentence in the caches; null: in order, with one or more hypotheses per source
    Rotations rotations;    // of this position
};

static inline int64_t place_of(const Step& step, int64_t sentence) {
    return step.places ? step.places[sentence] : sentence;
}

static inline void softmax(float* scores, int64_t count) {
    Vec most = spread(-INFINITY);
    int64_t k = 0;
    float largest = -INFINITY;
    for (; k + LANES <= count; k += LANES) most = larger(load(scores + k), most);
    for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
    for (; k < count; k++) largest = std::max(largest, scores[k]);
    Vec total = {};
    for (k = 0; k < count; k += LANES) {
        Vec value = exponential(load_up_to(scores + k, count - k) - largest);
        store_up_to(scores + k, value, count - k);
        for (int64_t lane = count - k; lane < LANES; lane++) value[lane] = 0;
        total += value;
    }
    const float factor = 1 / sum(total);
    for (k = 0; k < count; k += LANES) store_up_to(scores + k, load_up_to(scores + k, count - k) * factor, count - k);
}

constexpr int64_t AHEAD = 6;  // keys that are fetched before they are read

static inline float dot(const float* a, const float* b, int64_t count) {
    Vec total = {};
    for (int64_t k = 0; k < count; k += LANES) total += load_up_to(a + k, count - k) * load_up_to(b + k, count - k);
    return sum(total);
}

// Attention of a sentence's hypotheses to the target's keys, of which each sees its own; stores the new ones first,
// with 0 in place of NaN and infinities.
static void attend_target(const Attention& a, const Step& step, const Keys& keys, const float* qkv, float* y,
                          int64_t sentence, int64_t kv_head, float* scores) {
    const int64_t dim = a.dim, width = (a.heads + 2 * a.kv_heads) * dim, group = a.heads / a.kv_heads;
    float* key = keys.target + (place_of(step, sentence) * a.kv_heads + kv_head) * keys.capacity * dim;
    float* value = key + keys.to_values;
    const float scale = 1 / std::sqrt((float)dim);
    for (int64_t rank = 0; rank < step.beam; rank++) {
        const float* from = qkv + (sentence * step.beam + rank) * width + (a.heads + kv_head) * dim;
        for (float* to : {key + (step.past + rank) * dim, value + (step.past + rank) * dim}) {
            for (int64_t d = 0; d < dim; d += LANES) {
                Vec made = load_up_to(from + d, dim - d);
                store_up_to(to + d, magnitude(made) < spread(INFINITY) ? made : Vec{}, dim - d);
            }
            from += a.kv_heads * dim;  // from the key to the value
        }
    }
    for (int64_t rank = 0; rank < step.beam; rank++) {
        const int64_t number = sentence * step.beam + rank;
        const int32_t* seen = step.seen + number * step.stride;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            const float* q = qkv + number * width + head * dim;
            float* to = y + (number * a.heads + head) * dim;
            for (int64_t t = 0; t < step.length; t++) {
                const int64_t ahead = seen[std::min(t + AHEAD, step.length - 1)] * dim;
                for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(key + ahead + d), __builtin_prefetch(value + ahead + d);
                scores[t] = scale * dot(q, key + seen[t] * dim, dim);
            }
            softmax(scores, step.length);
            for (int64_t d = 0; d < dim; d += LANES) {
                Vec mean = {};
                for (int64_t t = 0; t < step.length; t++)
                    mean += scores[t] * load_up_to(value + seen[t] * dim + d, dim - d);
                store_up_to(to + d, mean, dim - d);
            }
        }
    }
}

constexpr int TOGETHER = 4;  // queries to the same keys

// Attention of up to TOGETHER queries, `stride` floats apart, to the keys of a source; outputs are `apart` floats apart.
template <int N>
static void attend_keys(const float* q, int64_t stride, const float* key, const float* value, const float* bias,
                        int64_t length, int64_t dim, float* y, int64_t apart, float* scores) {
    const float scale = 1 / std::sqrt((float)dim);
    for (int64_t s = 0; s < length; s += LANES) {
        Vec sums[N] = {}, added = bias ? load_up_to(bias + s, length - s) : Vec{};
        for (int64_t d = 0; d < dim; d++) {
            Vec k = load_up_to(key + d * length + s, length - s);
            for (int n = 0; n < N; n++) sums[n] += q[n * stride + d] * k;
        }
        for (int n = 0; n < N; n++) store_up_to(scores + n * length + s, sums[n] * scale + added, length - s);
    }
    for (int n = 0; n < N; n++) softmax(scores + n * length, length);
    for (int64_t d = 0; d < dim; d += LANES) {
        Vec sums[N] = {};
        for (int64_t s = 0; s < length; s++) {
            Vec v = load_up_to(value + s * dim + d, dim - d);
            for (int n = 0; n < N; n++) sums[n] += scores[n * length + s] * v;
        }
        for (int n = 0; n < N; n++) store_up_to(y + n * apart + d, sums[n], dim - d);
    }
}

static inline int64_t count_sources(const Step& step, const Keys& keys) {
    return step.places ? step.sentences : keys.sources;
}

// Attention of a source's hypotheses to it.
static void attend_source(const Attention& a, const Step& step, const Keys& keys, const float* queries, float* y,
                          int64_t source, int64_t kv_head, float* scores) {
    const int64_t dim = a.dim, length = keys.source_length, group = a.heads / a.kv_heads, width = a.heads * dim;
    const int64_t of_source = place_of(step, source), place = (of_source * a.kv_heads + kv_head) * length * dim;
    const int64_t beam = step.sentences * step.beam / count_sources(step, keys);
    const float* bias = keys.source_bias ? keys.source_bias + of_source * keys.bias_stride : nullptr;
    const float *key = keys.source_keys + place, *value = keys.source_values + place;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const int64_t first = source * beam * width + head * dim;
        int64_t rank = 0;
        for (; rank + TOGETHER <= beam; rank += TOGETHER)
            attend_keys<TOGETHER>(queries + first + rank * width, width, key, value, bias, length, dim,
                                  y + first + rank * width, width, scores);
        for (; rank < beam; rank++)
            attend_keys<1>(queries + first + rank * width, width, key, value, bias, length, dim,
                           y + first + rank * width, width, scores);
    }
}

typedef void (*AttendOne)(const Attention&, const Step&, const Keys&, const float*, float*, int64_t, int64_t, float*);

static void attend_all(AttendOne attend, int64_t sentences, const Attention& a, const Step& step, const Keys& keys,
                       const float* queries, float* y) {
    const int64_t room = std::max(step.length, TOGETHER * keys.source_length);
    const int64_t count = sentences * a.kv_heads;
#pragma omp parallel num_threads((int)step.threads) if (step.threads > 1)
    {
        static thread_local std::vector<float> scores;
        scores.resize(room + LANES);
#pragma omp for
        for (int64_t place = 0; place < count; place++)
            attend(a, step, keys, queries, y, place / a.kv_heads, place % a.kv_heads, scores.data());
    }
}
