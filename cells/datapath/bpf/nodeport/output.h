/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Where packets of services end up: in a pod, at another node, back at the client. A program in the driver leaves to the one
 * behind it what it cannot do itself.
 */
#pragma once

#ifdef CONTEXT_XDP
#include "xdp/send.h"
#else
#include "nodeport/deliver.h"
#include "nodeport/send.h"
#endif
