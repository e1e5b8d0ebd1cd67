// descriptor_room.h: 256 peers of both directions need about 1,024 descriptors, which is the usual soft limit. Raised
// only in processes that get near it, and never above what the administrator allows. Any thread.
#pragma once

#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "base/unique_fd.h"

namespace asyncfabric {

// `newest_fd`: a descriptor just opened; they are numbered from the bottom. -1: none could be opened.
inline void make_descriptor_room(int newest_fd) {
  constexpr rlim_t kPlenty = 16384;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kPlenty) return;
  if (newest_fd >= 0 && static_cast<rlim_t>(newest_fd) < limit.rlim_cur / 2) return;
  limit.rlim_cur = std::min(limit.rlim_max, kPlenty);
  setrlimit(RLIMIT_NOFILE, &limit);
}

// For libraries that open descriptors of their own.
inline void make_descriptor_room() {
  const UniqueFd newest(eventfd(0, EFD_CLOEXEC));
  make_descriptor_room(newest.get());
}

// Libraries report that descriptors ran out by other numbers, or not at all. Asked after something failed.
inline bool descriptors_ran_out() {
  const UniqueFd trial(eventfd(0, EFD_CLOEXEC));
  return !trial && (errno == EMFILE || errno == ENFILE);
}

}  // namespace asyncfabric
