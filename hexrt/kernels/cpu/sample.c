/* The next token of each row of logits, a row on one thread, so that what is drawn of a row depends on that row alone.

   penalty and grammar -> the largest -> e^((score - largest) / temperature) -> top-k, top-p, min-p -> the token at `number` of the sum

   The least probability that top-k or top-p keeps is found by counting over the bits of the probabilities, most significant first: these
   are not negative, so their bits are in the order of the numbers. Sums are in double, in the order of the vocabulary. */
#include <math.h>

#include "team.h"
#include "vector.h"

enum { DRAWN = 0, NOT_FINITE = 1, NOTHING_ALLOWED = 2 };
enum { HIGH = 1 << 14, LOW = 256, BLOCK = 128, ALIGN = 64 };

/* As `llm.engine_sampling.Draws`: indices count the rows; the first `cut` of the random ones have top_k, top_p and min_p, each null where off in
   all. All but `seen` and what follows `top` is read only. */
typedef struct {
    const float *logits;
    int64_t rows, vocabulary;
    const int64_t *random, *step;
    const float *inverse;
    const double *numbers;
    int64_t randoms, passes, cut;
    const int64_t *top_k;
    const double *top_p;
    const float *min_p;
    const int64_t *penalised, *slots;
    const float *penalty;
    uint8_t *seen;
    int64_t penalties;
    const int64_t *masked;
    const uint32_t *bits;
    int64_t masks, words;
    const int64_t *reported;
    int64_t reports, top;
    int64_t *tokens; /* [2, rows]: token, status */
    float *logprobs; /* [reports, 1 + top] */
    int64_t *ids;    /* [reports, top] */
    char *scratch;
    int64_t threads;
} hx_draws;

/* Where a row stands among those of each kind; -1 where it is none. */
typedef struct {
    int64_t random, penalty, mask, report;
} place;

typedef struct {
    float *scores, *shares;
    int32_t *list;
    double *high;
} room;

typedef struct {
    const hx_draws *draws;
    place *places;
    char *rooms;
    int64_t next;
} job;

static int64_t whole(int64_t bytes) { return (bytes + ALIGN - 1) / ALIGN * ALIGN; }
static int64_t row_bytes(int64_t vocabulary) { return whole(4 * vocabulary + 4 * VW); }
static int64_t room_bytes(int64_t vocabulary) { return 3 * row_bytes(vocabulary) + HIGH * (int64_t)sizeof(double); }

HX_API int64_t hx_sample_bytes(void) { return sizeof(hx_draws); }

HX_API int64_t hx_sample_scratch(int64_t rows, int64_t vocabulary, int64_t threads) {
    return ALIGN + whole(rows * (int64_t)sizeof(place)) + threads * room_bytes(vocabulary);
}

HX_INLINE uint32_t key_of(float share) {
    uint32_t key;
    memcpy(&key, &share, 4);
    return key;
}

/* The largest of a row; NaN where any is none. */
static float largest(const float *row, int64_t n) {
    vf most = hx_all(-INFINITY);
    vi none = {0};
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf x = hx_load(row + i, HX_F32);
        none |= (vi)(x != x);
        most = hx_max(most, x);
    }
    float best = -INFINITY;
    int bad = 0;
    for (int lane = 0; lane < VW; lane++) {
        bad |= none[lane];
        best = most[lane] > best ? most[lane] : best;
    }
    for (; i < n; i++) {
        bad |= row[i] != row[i];
        best = row[i] > best ? row[i] : best;
    }
    return bad ? NAN : best;
}

static int64_t first_of(const float *row, int64_t n, float value) {
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t end = i + BLOCK < n ? i + BLOCK : n;
        int any = 0;
        for (int64_t j = i; j < end; j++) any |= row[j] == value;
        for (int64_t j = i; any && j < end; j++)
            if (row[j] == value) return j;
    }
    return 0;
}

/* Keskar et al., "CTRL", 2019, section 4.1; and what a grammar forbids. */
static void restrict_row(const hx_draws *d, place at, const float *logits, float *scores) {
    const int64_t n = d->vocabulary;
    if (at.penalty >= 0) {
        const uint8_t *seen = d->seen + d->slots[at.penalty] * n;
        const float penalty = d->penalty[at.penalty];
        for (int64_t i = 0; i < n; i++) {
            const float x = logits[i], changed = x > 0 ? x / penalty : x * penalty;
            scores[i] = seen[i] ? changed : x;
        }
    } else
        memcpy(scores, logits, (size_t)(4 * n));
    if (at.mask >= 0) {
        const uint32_t *bits = d->bits + at.mask * d->words;
        for (int64_t i = 0; i < n; i++) scores[i] = bits[i >> 5] >> (i & 31) & 1 ? scores[i] : -INFINITY;
    }
}

/* shares = e^((scores - most) * inverse), at most 1; what lies past the end of the row is 0. */
static void share(const float *scores, int64_t n, float most, float inverse, float *shares) {
    for (int64_t i = 0; i < n; i += VW) {
        const int left = n - i < VW ? (int)(n - i) : VW;
        vf x = left == VW ? hx_load(scores + i, HX_F32) : hx_load_some(scores + i, left, HX_F32);
        x = (x - hx_all(most)) * hx_all(inverse);
        vf y = hx_exp(x);
        if (left < VW)
            for (int lane = left; lane < VW; lane++) y[lane] = 0;
        hx_store(shares + i, y, HX_F32);
    }
}

static double sum_of(const float *shares, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t end = i + BLOCK < n ? i + BLOCK : n;
        double part[4] = {0};
        int64_t j = i;
        for (; j + 4 <= end; j += 4)
            for (int lane = 0; lane < 4; lane++) part[lane] += shares[j + lane];
        for (; j < end; j++) part[0] += shares[j];
        sum += (part[0] + part[1]) + (part[2] + part[3]);
    }
    return sum;
}

/* The digit at which the sums from the top reach `left`, else the least that has any; `left` becomes what is to be reached in it. */
static int reach(const double *sums, int size, double *left) {
    int least = 0;
    double above = 0, before_least = 0;
    for (int digit = size - 1; digit >= 0; digit--) {
        if (sums[digit] <= 0) continue;
        if (above + sums[digit] >= *left) {
            *left -= above;
            return digit;
        }
        least = digit, before_least = above;
        above += sums[digit];
    }
    *left -= before_least;
    return least;
}

/* Keeps the fewest of the largest shares whose number, or mass, reaches `target`, of equals the first; the others become 0. */
static void keep(float *shares, int64_t n, int by_mass, double target, const room *room) {
    double *high = room->high, low[LOW];
    memset(high, 0, HIGH * sizeof(double));
    if (by_mass)
        for (int64_t i = 0; i < n; i++) high[key_of(shares[i]) >> 16] += shares[i];
    else
        for (int64_t i = 0; i < n; i++) high[key_of(shares[i]) >> 16] += 1;
    const uint32_t digit = (uint32_t)reach(high, HIGH, &target);
    int64_t many = 0;
    for (int64_t i = 0; i < n; i++) {
        room->list[many] = (int32_t)i;
        many += key_of(shares[i]) >> 16 == digit;
    }
    uint32_t bound = digit << 16;
    for (int shift = 8; shift >= 0; shift -= 8) {
        memset(low, 0, sizeof low);
        for (int64_t j = 0; j < many; j++) {
            const float one = shares[room->list[j]];
            low[key_of(one) >> shift & (LOW - 1)] += by_mass ? one : 1;
        }
        const uint32_t next = (uint32_t)reach(low, LOW, &target);
        int64_t left = 0;
        for (int64_t j = 0; j < many; j++) {
            const int32_t i = room->list[j];
            room->list[left] = i;
            left += (key_of(shares[i]) >> shift & (LOW - 1)) == next;
        }
        many = left;
        bound |= next << shift;
    }
    if (!many) return;
    const double one = by_mass ? shares[room->list[0]] : 1;
    const double few = one > 0 ? ceil(target / one) : (double)many;
    for (int64_t i = 0; i < n; i++) shares[i] = key_of(shares[i]) >= bound ? shares[i] : 0;
    for (int64_t j = few < 1 ? 1 : few < (double)many ? (int64_t)few : many; j < many; j++) shares[room->list[j]] = 0;
}

static void cut(const hx_draws *d, int64_t at, float *shares, const room *room) {
    const int64_t n = d->vocabulary;
    if (d->top_k && d->top_k[at] < n) keep(shares, n, 0, (double)d->top_k[at], room);
    if (d->top_p && d->top_p[at] < 1) keep(shares, n, 1, d->top_p[at] * sum_of(shares, n), room);
    if (d->min_p && d->min_p[at] > 0) /* of the likeliest, whose share is 1 */
        for (int64_t i = 0; i < n; i++) shares[i] = shares[i] >= d->min_p[at] ? shares[i] : 0;
}

/* The token at `number`, in [0, 1), of the cumulated shares. */
static int64_t draw(const float *shares, int64_t n, double number) {
    const double target = number * sum_of(shares, n);
    double before = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t count = i + BLOCK < n ? BLOCK : n - i;
        const double part = sum_of(shares + i, count);
        if (part > 0 && before + part > target) {
            for (int64_t j = i; j < i + count; j++) {
                if (shares[j] <= 0) continue;
                last = j;
                before += shares[j];
                if (before > target) return j;
            }
            return last; /* the block's sum was rounded up */
        }
        if (part > 0) last = i;
        before += part;
    }
    for (int64_t j = last; j < n && j < last + BLOCK; j++) /* the whole sum was: the last that has any */
        if (shares[j] > 0) last = j;
    return last;
}

/* Of the model's own distribution: log-probabilities of the token and of the `top` likeliest, of equals the first. */
static void report(const hx_draws *d, int64_t at, const float *logits, float most, int64_t token, float *shares) {
    const int64_t n = d->vocabulary, top = d->top;
    float *values = d->logprobs + at * (1 + top);
    int64_t *ids = d->ids + at * top, held = 0;
    share(logits, n, most, 1, shares);
    const float sum = most + (float)log(sum_of(shares, n));
    values[0] = logits[token] - sum;
    for (int64_t i = 0; i < n && top; i++) {
        if (held == top && !(logits[i] - sum > values[top])) continue;
        int64_t j = held < top ? held++ : top - 1;
        for (; j > 0 && logits[i] - sum > values[j]; j--) values[1 + j] = values[j], ids[j] = ids[j - 1];
        values[1 + j] = logits[i] - sum, ids[j] = i;
    }
}

static void one_row(const hx_draws *d, int64_t row, place at, const room *room) {
    const int64_t n = d->vocabulary;
    const float *logits = d->logits + row * n, *scores = logits;
    const float own = largest(logits, n);
    float most = own;
    if (at.penalty >= 0 || at.mask >= 0) {
        restrict_row(d, at, logits, room->scores);
        scores = room->scores;
        most = largest(scores, n);
    }
    const int status = !isfinite(own) ? NOT_FINITE : most == -INFINITY ? NOTHING_ALLOWED : isfinite(most) ? DRAWN : NOT_FINITE;
    int64_t token = first_of(scores, n, most);
    if (status == DRAWN && at.random >= 0) {
        share(scores, n, most, d->inverse[at.random], room->shares);
        if (at.random < d->cut) cut(d, at.random, room->shares, room);
        token = draw(room->shares, n, d->numbers[at.random * d->passes + *d->step]);
    }
    if (at.report >= 0) report(d, at.report, logits, own, token, room->shares);
    if (at.penalty >= 0) d->seen[d->slots[at.penalty] * n + token] = 1;
    d->tokens[row] = token;
    d->tokens[d->rows + row] = status;
}

static void work(void *given, int thread, int threads) {
    (void)threads;
    job *shared = given;
    const hx_draws *d = shared->draws;
    const int64_t bytes = row_bytes(d->vocabulary);
    char *mine = shared->rooms + thread * room_bytes(d->vocabulary);
    const room room = {(float *)mine, (float *)(mine + bytes), (int32_t *)(mine + 2 * bytes), (double *)(mine + 3 * bytes)};
    for (int64_t row; (row = hx_next(&shared->next)) < d->rows;) one_row(d, row, shared->places[row], &room);
}

HX_API void hx_sample_run(const hx_draws *d) {
    char *at = (char *)(((uintptr_t)d->scratch + ALIGN - 1) / ALIGN * ALIGN);
    place *places = (place *)at;
    for (int64_t row = 0; row < d->rows; row++) places[row] = (place){-1, -1, -1, -1};
    for (int64_t i = 0; i < d->randoms; i++) places[d->random[i]].random = i;
    for (int64_t i = 0; i < d->penalties; i++) places[d->penalised[i]].penalty = i;
    for (int64_t i = 0; i < d->masks; i++) places[d->masked[i]].mask = i;
    for (int64_t i = 0; i < d->reports; i++) places[d->reported[i]].report = i;
    job shared = {d, places, at + whole(d->rows * (int64_t)sizeof(place)), 0};
    hx_team_run((int)(d->threads < d->rows ? d->threads : d->rows), work, &shared);
}
