// errors.h: libfabric's error numbers to Status. Pure, any thread.
#pragma once

#include "asyncfabric/status.h"

namespace asyncfabric::libfabric {

// Of posted work. `error` is positive, as in fi_cq_err_entry::err.
Status status_of_work(int error);

// Whether the error only means that a connection ended, not why.
bool connection_broke(int error);

// Of opening, registering and connecting.
Status status_of_control(int error);

}  // namespace asyncfabric::libfabric
