// start_thread.h: starts a thread where the kernel may refuse one: RLIMIT_NPROC, or the pids limit of a container. Any thread.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "asyncfabric/status.h"

namespace asyncfabric {

// kNoMemory, and the kernel's number (EAGAIN for those limits), when there is no thread; `detail` may be null.
template <typename Run>
Status start_thread(Run run, std::thread* out, std::string* detail) {
  try {
    *out = std::thread(std::move(run));
  } catch (const std::system_error& error) {
    if (detail != nullptr) *detail = "a thread could not be started: " + error.code().message();
    return {StatusCode::kNoMemory, error.code().value()};
  }
  return {};
}

}  // namespace asyncfabric
