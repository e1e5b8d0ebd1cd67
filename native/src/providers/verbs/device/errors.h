// errors.h: what failed completions and failed calls mean. Pure, any thread.
#pragma once

#include <infiniband/verbs.h>

#include "asyncfabric/status.h"

namespace asyncfabric::verbs {

// Of a posted request. `raw` is the ibv_wc_status.
Status status_of_work(ibv_wc_status status);

// Whether the peer itself answered with a refusal: then it lives, and nothing behind the refused request was executed.
bool peer_answered(ibv_wc_status status);

// Of a call into the library: `error` is an errno.
Status status_of_call(int error);

}  // namespace asyncfabric::verbs
