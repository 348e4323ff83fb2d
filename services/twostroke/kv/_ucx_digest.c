#include "_ucx_digest.h"

#include <string.h>

#define WEIGHT_A 0x9e3779b97f4a7c15ull
#define WEIGHT_B 0xd1b54a32d192ed03ull

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

typedef struct {
    uint64_t nh, sum;
} Stripe;

static inline uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

FOR_EACH_CPU
static Stripe stripe(const unsigned char *data, const uint64_t *key)
{
    uint64_t nh = 0, sum = 0;
    for (size_t i = 0; i < DIGEST_STRIPE_WORDS; i++) {
        uint64_t word;
        memcpy(&word, data + 8 * i, 8);
        uint64_t low = (uint32_t)word + (key[i] & 0xffffffffu);
        uint64_t high = (word >> 32) + (key[i] >> 32);
        nh += (low & 0xffffffffu) * (high & 0xffffffffu);
        sum += word;
    }
    return (Stripe){nh, sum};
}

static void digest_range(const unsigned char *data, size_t nbytes, const uint64_t *key, uint64_t out[2])
{
    const size_t stripe_bytes = 8 * DIGEST_STRIPE_WORDS;
    uint64_t a = mix(nbytes + WEIGHT_A), b = mix(nbytes + WEIGHT_B), index = 1;
    for (; nbytes >= stripe_bytes; data += stripe_bytes, nbytes -= stripe_bytes, index++) {
        Stripe s = stripe(data, key);
        a += mix(s.nh + index * WEIGHT_A);
        b += mix(s.sum + index * WEIGHT_B);
    }
    if (nbytes > 0) {
        unsigned char last[8 * DIGEST_STRIPE_WORDS];
        memcpy(last, data, nbytes);
        memset(last + nbytes, 0, stripe_bytes - nbytes);
        Stripe s = stripe(last, key);
        a += mix(s.nh + index * WEIGHT_A);
        b += mix(s.sum + index * WEIGHT_B);
    }
    out[0] = a;
    out[1] = b;
}

void digest_ranges(const int64_t *ranges, size_t count, const uint64_t *key, uint64_t out[2])
{
    out[0] = out[1] = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t one[2];
        digest_range((const unsigned char *)(uintptr_t)ranges[2 * i], (size_t)ranges[2 * i + 1], key, one);
        out[0] += mix(one[0] + (i + 1) * WEIGHT_A);
        out[1] += mix(one[1] + (i + 1) * WEIGHT_B);
    }
}
