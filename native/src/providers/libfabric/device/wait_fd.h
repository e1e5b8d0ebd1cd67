// wait_fd.h: the file descriptor that shows "progress is possible". At opening only.
#pragma once

#include "providers/libfabric/device/device.h"

namespace asyncfabric::libfabric {

// -1: the CQ cannot be slept on.
int find_wait_fd(const Library& library, const fi_info& info, fid_cq* cq);

}  // namespace asyncfabric::libfabric
