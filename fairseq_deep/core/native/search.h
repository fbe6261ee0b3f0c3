// The words of a step of beam search: normalisers of their scores, and the best candidates.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

struct Candidate {
    float score;
    int64_t place;  // rank * words + word
};

// The `count` best scores, logit + offset, of the hypotheses of a sentence, the best first; ties go to the first place.
static void find_best(const float* logits, const float* offsets, int64_t beam, int64_t words, int64_t count,
                      Candidate* found) {
    int64_t size = 0;
    auto offer = [&](float score, int64_t place) {
        if (std::isnan(score)) score = -INFINITY;
        if (size == count && !(score > found[count - 1].score)) return;
        int64_t at = size < count ? size++ : count - 1;
        for (; at > 0 && score > found[at - 1].score; at--) found[at] = found[at - 1];
        found[at] = {score, place};
    };
    for (int64_t rank = 0; rank < beam; rank++) {
        const float *row = logits + rank * words, offset = offsets[rank];
        int64_t word = 0;
        for (; word + LANES <= words; word += LANES) {
            const Vec scores = load(row + word) + offset;
            if (size == count && !any_larger(scores, spread(found[count - 1].score))) continue;
            for (int lane = 0; lane < LANES; lane++) offer(scores[lane], rank * words + word + lane);
        }
        for (; word < words; word++) offer(row[word] + offset, rank * words + word);
    }
}

extern "C" {

// logits: (sentences * beam) x words, offsets: sentences x beam; scores, chosen and ranks: sentences x count.
void best_candidates(const float* logits, const float* offsets, int64_t sentences, int64_t beam, int64_t words,
                     int64_t count, float* scores, int64_t* chosen, int64_t* ranks, int64_t threads) {
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        std::vector<Candidate> found(count);
#pragma omp for
        for (int64_t sentence = 0; sentence < sentences; sentence++) {
            find_best(logits + sentence * beam * words, offsets + sentence * beam, beam, words, count, found.data());
            for (int64_t k = 0; k < count; k++) {
                scores[sentence * count + k] = found[k].score;
                chosen[sentence * count + k] = found[k].place % words;
                ranks[sentence * count + k] = found[k].place / words;
            }
        }
    }
}

// log sum exp of each row.
void log_normalisers(const float* rows, int64_t count, int64_t width, float* y, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1)
    for (int64_t row = 0; row < count; row++) {
        const float* x = rows + row * width;
        float largest = -INFINITY;
        Vec most = spread(largest), total = {};
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES) most = larger(load(x + k), most);
        for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
        for (; k < width; k++) largest = std::max(largest, x[k]);
        for (k = 0; k + LANES <= width; k += LANES) total += exponential(load(x + k) - largest);
        float rest = 0;
        for (; k < width; k++) rest += std::exp(x[k] - largest);
        y[row] = largest + std::log(sum(total) + rest);
    }
}
}
