// signals.h: libfabric and the libraries that it loads take over signals while they are loaded and initialised, and while an endpoint
// opens that brings shared memory of libfabric's (efa's may): SIGINT, SIGTERM, SIGSEGV, SIGBUS and more. They belong to the program (Python's KeyboardInterrupt, faulthandler, sanitizers),
// so whoever calls into libfabric for the first time puts them back. Control thread.
#pragma once

#include <signal.h>

#include <array>
#include <mutex>

namespace asyncfabric::libfabric {

class KeepSignalHandlers {
 public:
  KeepSignalHandlers() : guard_(mutex()) {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~KeepSignalHandlers() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  KeepSignalHandlers(const KeepSignalHandlers&) = delete;
  KeepSignalHandlers& operator=(const KeepSignalHandlers&) = delete;

 private:
  // Nested keepers of one thread are fine; those of two threads would save what the other one's library just installed.
  static std::recursive_mutex& mutex() {
    static auto& only = *new std::recursive_mutex();
    return only;
  }
  static constexpr std::array kSignals{SIGHUP,  SIGINT,  SIGQUIT, SIGILL,  SIGTRAP, SIGABRT, SIGBUS, SIGFPE,
                                       SIGUSR1, SIGSEGV, SIGUSR2, SIGPIPE, SIGALRM, SIGTERM, SIGCHLD};
  std::lock_guard<std::recursive_mutex> guard_;
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace asyncfabric::libfabric
