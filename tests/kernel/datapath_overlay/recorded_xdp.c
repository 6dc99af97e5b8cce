// SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause)
#define REDIRECTED 4 /* XDP_REDIRECT */
#include "recorded.h"

#include "xdp.c"
