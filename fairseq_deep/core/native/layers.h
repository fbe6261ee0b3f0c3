// Layers of decoder and encoder. `structures.py` has the same structures.
//
//     post-norm  x = LN(x + s F(x)),  pre-norm  x = x + s F(LN(x)),  for attention to the own positions, to the source, FFN
#pragma once

#include "attention.h"

struct Norm {
    int64_t kind;  // 0: none, 1: LayerNorm, 2: RMSNorm
    const float *weight, *bias;
    double eps;
};

struct Layer {
    int64_t pre_norm;
    Norm norms[3];
    Attention self, source;
    Linear source_keys, source_values;
    Linear fc1, gate, fc2;  // fc2(act(fc1(x)) * gate(x)); without gate if it has no outputs
    int64_t activation;     // an Activation
    float scales[3];        // of the branches, in the order of `norms`
};

static void normalise(const Norm& norm, const float* x, float* y, int64_t width) {
    float mean = 0, squares = 0;
    if (norm.kind == 1) {
        Vec total = {};
        for (int64_t k = 0; k < width; k += LANES) total += load_up_to(x + k, width - k);
        mean = sum(total) / width;
    }
    Vec total = {};
    for (int64_t k = 0; k < width; k += LANES) {
        Vec centred = load_up_to(x + k, width - k) - mean;
        for (int64_t lane = width - k; lane < LANES; lane++) centred[lane] = 0;
        total += centred * centred;
    }
    squares = sum(total) / width;
    const float factor = 1 / std::sqrt(squares + (float)norm.eps);
    for (int64_t k = 0; k < width; k += LANES) {
        Vec value = (load_up_to(x + k, width - k) - mean) * factor * load_up_to(norm.weight + k, width - k);
        if (norm.kind == 1) value += load_up_to(norm.bias + k, width - k);
        store_up_to(y + k, value, width - k);
    }
}

static const float* normalise_rows(const Norm& norm, const float* x, float* y, int64_t rows, int64_t width, int threads) {
    if (!norm.kind) return x;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) normalise(norm, x + row * width, y + row * width, width);
    return y;
}

struct Scratch {  // memory of a layer, kept by the thread
    std::vector<float> normed, wide, heads;
};

static Scratch& scratch_for(int64_t rows, int64_t width, int64_t wide, int64_t heads) {
    static thread_local Scratch scratch;
    scratch.normed.resize(rows * width);
    scratch.wide.resize(rows * wide);
    scratch.heads.resize(rows * heads);
    return scratch;
}

// Rotate the queries and keys of rows by the angles of their positions, `together` rows at each: see rotary.py.
static void rotate(const Attention& a, const Rotations& at, int64_t rows, int64_t together, int threads, float* qkv) {
    const int64_t width = (a.heads + 2 * a.kv_heads) * a.dim, half = a.dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *cos = at.cos + row / together * a.dim, *sin = at.sin + row / together * a.dim;
        for (int64_t head = 0; head < a.heads + a.kv_heads; head++) {
            float *first = qkv + row * width + head * a.dim, *second = first + half;
            for (int64_t d = 0; d < half; d += LANES) {
                const int64_t left = half - d;
                const Vec x = load_up_to(first + d, left), y = load_up_to(second + d, left);
                store_up_to(first + d, x * load_up_to(cos + d, left) + y * load_up_to(sin + d, left), left);
                store_up_to(second + d, y * load_up_to(cos + half + d, left) + x * load_up_to(sin + half + d, left), left);
            }
        }
    }
}

// y = W_o (heads + added), with an ending
static void attend(bool to_source, const Attention& attention, const Step& step, const Keys& keys, const float* x,
                   const float* added, const Ending& ending, float* y, Scratch& scratch) {
    const int64_t rows = step.sentences * step.beam, width = attention.heads * attention.dim;
    const int threads = (int)step.threads;
    float *wide = scratch.wide.data(), *heads = scratch.heads.data();
    multiply(attention.input, x, wide, rows, threads, {NO_ACTIVATION, nullptr});
    if (!to_source && step.rotations.cos) rotate(attention, step.rotations, rows, rows, threads, wide);
    if (to_source)
        attend_all(attend_source, count_sources(step, keys), attention, step, keys, wide, heads);
    else
        attend_all(attend_target, step.sentences, attention, step, keys, wide, heads);
    for (int64_t k = 0; added && k < rows * width; k++) heads[k] += added[k];
    multiply(attention.output, heads, y, rows, threads, ending);
}

// Sub-layer `part` with its norm and residual connection, from x to y, which may be the same.
template <class F>
static void connect(const Layer& layer, int part, int64_t rows, int threads, Scratch& scratch, const float* x, float* y,
                    F branch) {
    const Norm& norm = layer.norms[part];
    const int64_t width = layer.fc2.outputs;
    const Ending ending = {NO_ACTIVATION, x, nullptr, layer.scales[part]};
    if (layer.pre_norm) {
        branch(normalise_rows(norm, x, scratch.normed.data(), rows, width, threads), ending, y);
    } else {
        branch(x, ending, y);
        normalise_rows(norm, y, y, rows, width, threads);
    }
}

static void feed_forward(const Layer& layer, int64_t rows, int threads, Scratch& scratch, float* y) {
    connect(layer, 2, rows, threads, scratch, y, y, [&](const float* in, const Ending& ending, float* out) {
        float *hidden = scratch.wide.data(), *gate = layer.gate.outputs ? hidden + rows * layer.fc1.outputs : nullptr;
        if (gate) multiply(layer.gate, in, gate, rows, threads, {NO_ACTIVATION, nullptr});
        multiply(layer.fc1, in, hidden, rows, threads, {(Activation)layer.activation, nullptr, gate});
        multiply(layer.fc2, hidden, out, rows, threads, ending);
    });
}

constexpr size_t KEPT = 1 << 22;  // floats: a larger scratch is freed after use

static Scratch& scratch_for(const Layer& layer, int64_t rows) {
    const int64_t wide = std::max(layer.self.input.outputs, layer.fc1.outputs + layer.gate.outputs);
    return scratch_for(rows, layer.fc2.outputs, wide, layer.self.heads * layer.self.dim);
}

struct Source {  // positions of whole sentences: rows are those of T x B
    int64_t sentences, length, threads;
    const float* bias;  // a row of T for each sentence, added to the scores; null for none
    int64_t bias_stride;
    Rotations rotations;
};

// Attention of all positions to all positions of the same sentence.
static void attend_within(const Attention& a, const Source& source, const float* qkv, float* y) {
    const int64_t dim = a.dim, width = (a.heads + 2 * a.kv_heads) * dim, group = a.heads / a.kv_heads;
    const int64_t length = source.length, sentences = source.sentences, count = sentences * a.kv_heads;
    const int64_t stride = sentences * width, apart = sentences * a.heads * dim;
#pragma omp parallel num_threads((int)source.threads) if (source.threads > 1)
    {
        static thread_local std::vector<float> keys, values, scores;
        keys.resize(dim * length + LANES);
        values.resize(dim * length + LANES);
        scores.resize(TOGETHER * length + LANES);
#pragma omp for
        for (int64_t place = 0; place < count; place++) {
            const int64_t sentence = place / a.kv_heads, kv_head = place % a.kv_heads;
            const float* bias = source.bias ? source.bias + sentence * source.bias_stride : nullptr;
            for (int64_t t = 0; t < length; t++) {
                const float* key = qkv + t * stride + sentence * width + (a.heads + kv_head) * dim;
                for (int64_t d = 0; d < dim; d++) keys[d * length + t] = key[d];
                memcpy(values.data() + t * dim, key + a.kv_heads * dim, 4 * dim);
            }
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                const float* q = qkv + sentence * width + head * dim;
                float* to = y + (sentence * a.heads + head) * dim;
                int64_t t = 0;
                for (; t + TOGETHER <= length; t += TOGETHER)
                    attend_keys<TOGETHER>(q + t * stride, stride, keys.data(), values.data(), bias, length, dim,
                                          to + t * apart, apart, scores.data());
                for (; t < length; t++)
                    attend_keys<1>(q + t * stride, stride, keys.data(), values.data(), bias, length, dim,
                                   to + t * apart, apart, scores.data());
            }
        }
    }
}
