/* 128-bit digest of memory ranges; digest.py says what it detects and has the same in numpy. */
#ifndef TWOSTROKE_UCX_DIGEST_H
#define TWOSTROKE_UCX_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#define DIGEST_STRIPE_WORDS 1024

/* ranges: `count` pairs (address, bytes). The key is DIGEST_STRIPE_WORDS words, the same for both ends. */
void digest_ranges(const int64_t *ranges, size_t count, const uint64_t *key, uint64_t out[2]);

#endif
