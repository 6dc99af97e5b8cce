// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4), for the names of the delete queue's files.
#pragma once

#include <stddef.h>

// Write the digest of `length` bytes as 64 hex digits and a zero.
void sha256_hex(const void *bytes, size_t length, char hex[65]);
