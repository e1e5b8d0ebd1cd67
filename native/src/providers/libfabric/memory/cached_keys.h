// cached_keys.h: finds out whether the library hands out cached registrations, whose keys outlive fi_close() and have all rights.
// settings.cc turns the cache off, but a user's FI_MR_CACHE_MAX_COUNT or an earlier user of the library in this process wins. At opening.
#pragma once

#include "providers/libfabric/device/device.h"

namespace asyncfabric::libfabric {

// Two registrations of one page that live at once have two keys, unless they come out of a cache.
bool hands_out_cached_keys(const Device& device);

}  // namespace asyncfabric::libfabric
