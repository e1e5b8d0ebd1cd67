// descriptor_room.h: 256 peers of both directions need about 1,024 descriptors, which is the usual soft limit. Raised
// only in processes that get near it, and never above what the administrator allows. Any thread.
#pragma once

#include <sys/resource.h>

#include <algorithm>

namespace asyncfabric::local {

// `newest_fd`: a descriptor just opened; they are numbered from the bottom.
inline void make_descriptor_room(int newest_fd) {
  constexpr rlim_t kPlenty = 16384;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kPlenty) return;
  if (newest_fd >= 0 && static_cast<rlim_t>(newest_fd) < limit.rlim_cur / 2) return;
  limit.rlim_cur = std::min(limit.rlim_max, kPlenty);
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace asyncfabric::local
