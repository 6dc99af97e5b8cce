// SPDX-License-Identifier: Apache-2.0
/* Maglev lookup tables, bit for bit as Cilium makes them.
 *
 * Source: Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI 2016, section 3.4;
 * MurmurHash3_x64_128 by Austin Appleby (public domain). No libc: the arrays come from the caller.
 */

#include <stdint.h>

typedef unsigned long usize;

static uint64_t rotate(uint64_t x, int bits)
{
	return x << bits | x >> (64 - bits);
}

static uint64_t mix(uint64_t k)
{
	k ^= k >> 33;
	k *= 0xff51afd7ed558ccdULL;
	k ^= k >> 33;
	k *= 0xc4ceb9fe1a85ec53ULL;
	return k ^ k >> 33;
}

static uint64_t little_endian(const uint8_t *bytes, usize count)
{
	uint64_t value = 0;

	for (usize i = 0; i < count; i++)
		value |= (uint64_t)bytes[i] << (8 * i);
	return value;
}

static void murmur3(const uint8_t *data, usize length, uint32_t seed, uint64_t *first, uint64_t *second)
{
	const uint64_t c1 = 0x87c37b91114253d5ULL, c2 = 0x4cf5ad432745937fULL;
	uint64_t h1 = seed, h2 = seed, k1, k2;
	usize blocks = length / 16, rest = length % 16;

	for (usize i = 0; i < blocks; i++) {
		k1 = little_endian(data + 16 * i, 8);
		k2 = little_endian(data + 16 * i + 8, 8);
		h1 ^= rotate(k1 * c1, 31) * c2;
		h1 = (rotate(h1, 27) + h2) * 5 + 0x52dce729;
		h2 ^= rotate(k2 * c2, 33) * c1;
		h2 = (rotate(h2, 31) + h1) * 5 + 0x38495ab5;
	}
	data += 16 * blocks;
	if (rest > 8)
		h2 ^= rotate(little_endian(data + 8, rest - 8) * c2, 33) * c1;
	if (rest)
		h1 ^= rotate(little_endian(data, rest > 8 ? 8 : rest) * c1, 31) * c2;
	h1 ^= length;
	h2 ^= length;
	h1 += h2;
	h2 += h1;
	h1 = mix(h1);
	h2 = mix(h2);
	h1 += h2;
	h2 += h1;
	*first = h1;
	*second = h2;
}

struct backend {
	uint32_t id;
	uint32_t weight;
	uint32_t name; /* where its name begins in names[] */
	uint32_t length; /* of the name */
	/* Filled here: */
	uint32_t skip;
	uint32_t next; /* the slot it would take next */
	double turns;
};

/* The slot after the next one. Both are less than size: no division, which would take most of the time. */
static uint32_t after(const struct backend *one, uint32_t size)
{
	uint32_t slot = one->next + one->skip;

	return slot < size ? slot : slot - size;
}

/* Fill table[size] with backend ids; 0 marks a slot that is free, so no id may be 0. The backends come in the
 * byte order of their names: every node must fill in the same order. size is prime. Without backends all are free. */
void maglev_fill(struct backend *backends, uint32_t count, const uint8_t *names, uint32_t seed, uint32_t *table,
		 uint32_t size)
{
	uint64_t sum = 0, first, second;
	uint32_t in_turn = 0;
	int weighted;

	for (uint32_t i = 0; i < size; i++)
		table[i] = 0;
	if (!count || size < 2)
		return;
	for (uint32_t i = 0; i < count; i++) {
		struct backend *one = &backends[i];

		murmur3(names + one->name, one->length, seed, &first, &second);
		one->next = first % size;
		one->skip = second % (size - 1) + 1;
		one->turns = (double)one->weight / count;
		sum += one->weight;
	}
	weighted = sum / count > 1;
	for (uint64_t filled = 0; filled < size; filled++) {
		uint32_t turn = in_turn;

		if (++in_turn == count)
			in_turn = 0;
		while (weighted && (filled + 1) * backends[turn].weight < (uint64_t)backends[turn].turns)
			turn = (turn + 1) % count;
		struct backend *one = &backends[turn];

		if (weighted)
			one->turns += (double)sum;
		while (table[one->next])
			one->next = after(one, size);
		table[one->next] = one->id;
		one->next = after(one, size);
	}
}
