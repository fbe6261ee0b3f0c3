// Whole encoders, and decoding steps of whole decoders. `structures.py` has the same structures.
#pragma once

#include "layers.h"

struct Decoder {
    const Layer* const* layers;
    int64_t count;
    const float* embedding;  // V x C
    double scale;            // of the embedding
    Norm embedding_norm, final_norm;
    Linear output;
};

static void decoder_layer(const Layer& layer, const Step& step, const Keys& keys, const float* x, float* y) {
    const int64_t rows = step.sentences * step.beam;
    const int threads = (int)step.threads;
    Scratch& scratch = scratch_for(layer, rows);
    for (int source = 0; source < (layer.source.heads ? 2 : 1); source++)
        connect(layer, source, rows, threads, scratch, source ? y : x, y,
                [&](const float* in, const Ending& ending, float* out) {
                    const Attention& attention = source ? layer.source : layer.self;
                    attend(source, attention, step, keys, in, nullptr, ending, out, scratch);
                });
    feed_forward(layer, rows, threads, scratch, y);
}

extern "C" {

// Layers of the encoder that each read the one below, from x to y (T x B x C); x is not changed.
void encoder_layers(const Layer* const* layers, int64_t count, const Source* at, const float* x, float* y) {
    const Source& source = *at;
    const int64_t rows = source.sentences * source.length;
    const int threads = (int)source.threads;
    for (int64_t k = 0; k < count; k++, x = y) {
        const Layer& layer = *layers[k];
        Scratch& scratch = scratch_for(layer, rows);
        connect(layer, 0, rows, threads, scratch, x, y, [&](const float* in, const Ending& ending, float* out) {
            float *wide = scratch.wide.data(), *heads = scratch.heads.data();
            multiply(layer.self.input, in, wide, rows, threads, {NO_ACTIVATION, nullptr});
            if (source.rotations.cos) rotate(layer.self, source.rotations, rows, source.sentences, threads, wide);
            attend_within(layer.self, source, wide, heads);
            multiply(layer.self.output, heads, out, rows, threads, ending);
        });
        feed_forward(layer, rows, threads, scratch, y);
        if (k == count - 1 && scratch.wide.size() > KEPT) scratch = {};
    }
}

// Keys and values of a memory (S x sources x C), for all steps of a search.
void keep_memory(const Layer* of, const float* memory, const Keys* to, int64_t threads) {
    const Layer& layer = *of;
    const Keys& keys = *to;
    const int64_t heads = layer.source.kv_heads, dim = layer.source.dim, width = heads * dim, length = keys.source_length;
    std::vector<float> room(length * keys.sources * width);
    for (int is_value = 0; is_value < 2; is_value++) {
        multiply(is_value ? layer.source_values : layer.source_keys, memory, room.data(), length * keys.sources,
                 (int)threads, {NO_ACTIVATION, nullptr});
        for (int64_t place = 0; place < keys.sources * heads; place++) {
            const float* from = room.data() + place * dim;
            float* y = (is_value ? keys.source_values : keys.source_keys) + place * dim * length;
            for (int64_t s = 0; s < length; s++, from += keys.sources * width) {
                if (is_value)
                    memcpy(y + s * dim, from, 4 * dim);
                else
                    for (int64_t d = 0; d < dim; d++) y[d * length + s] = from[d];
            }
        }
    }
}

// Go on from the step `before` with its hypotheses `order`: fills `seen` and `places` of the step `after`. Position t of
// the hypothesis of rank r is in slot t * slots + r.
void next_step(const Step* before, Step* after, const int64_t* order, int64_t slots) {
    after->past = before->length * slots;
    after->length = before->length + 1;
    for (int64_t row = 0; row < after->sentences * after->beam; row++) {
        int32_t* seen = after->seen + row * after->stride;
        if (before->length) memcpy(seen, before->seen + order[row] * before->stride, 4 * before->length);
        seen[before->length] = (int32_t)(after->past + row % after->beam);
    }
    for (int64_t sentence = 0; sentence < after->sentences; sentence++)
        after->places[sentence] = before->length ? before->places[order[sentence * after->beam] / before->beam] : sentence;
}

void decoder_layer_step(const Layer* layer, const Step* step, const Keys* keys, const float* x, float* y) {
    decoder_layer(*layer, *step, *keys, x, y);
}

// The scores of all tokens (rows x V) after `words`, one per row; layers each read the one below. `position` is added to
// the embeddings; null for none.
void decoder_step(const Decoder* of, const Step* step, const Keys* const* keys, const int64_t* words,
                  const float* position, float* logits) {
    const Decoder& decoder = *of;
    const int64_t rows = step->sentences * step->beam, dim = decoder.output.inputs;
    const int threads = (int)step->threads;
    static thread_local std::vector<float> room;
    room.resize(rows * dim);
    float* x = room.data();
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < dim; d++)
            x[row * dim + d] = decoder.embedding[words[row] * dim + d] * (float)decoder.scale + (position ? position[d] : 0);
    normalise_rows(decoder.embedding_norm, x, x, rows, dim, threads);
    for (int64_t k = 0; k < decoder.count; k++) decoder_layer(*decoder.layers[k], *step, *keys[k], x, x);
    normalise_rows(decoder.final_norm, x, x, rows, dim, threads);
    multiply(decoder.output, x, logits, rows, threads, {NO_ACTIVATION, nullptr});
}
}
