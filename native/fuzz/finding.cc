// finding.cc: see finding.h. The handlers run in a process that is about to end, so they call what is safe there, and plain writes.
#include "finding.h"

#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace asyncfabric::fuzz {
namespace {

std::string folder_of_findings, program_of_findings;
const char* target_now = nullptr;
std::string_view bytes_now;
std::atomic<uint64_t> inputs{0};  // begun. Partner: the timer's handler, which sees whether it grows
uint64_t inputs_at_tick = 0;
unsigned ticks = 0;

void write_finding() {
  if (target_now == nullptr) return;
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : bytes_now) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  char path[512];
  std::snprintf(path, sizeof path, "%s/%s-%016lx", folder_of_findings.c_str(), target_now,
                static_cast<unsigned long>(hash));
  const int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
  const bool written =
      fd >= 0 && write(fd, bytes_now.data(), bytes_now.size()) == static_cast<ssize_t>(bytes_now.size());
  std::fprintf(stderr, "fuzz: FINDING in %s, %zu bytes%s\nfuzz: repeat it with: %s --run %s %s\n", target_now,
               bytes_now.size(), written ? "" : ", which could not be written", program_of_findings.c_str(), target_now,
               path);
  target_now = nullptr;
}

void on_abort(int) {
  write_finding();
  _exit(1);
}

void on_tick(int) {
  const uint64_t now = inputs.load(std::memory_order_relaxed);
  ticks = now == inputs_at_tick && target_now != nullptr ? ticks + 1 : 0;
  inputs_at_tick = now;
  if (ticks < kMostSeconds) return;
  std::fprintf(stderr, "fuzz: one input takes more than %u s of the processor\n", kMostSeconds);
  write_finding();
  _exit(1);
}

}  // namespace

void watch_findings(const std::string& folder, const std::string& program) {
  folder_of_findings = folder;
  program_of_findings = program;
  __sanitizer_set_death_callback(write_finding);
  signal(SIGABRT, on_abort);
  signal(SIGPROF, on_tick);
  const itimerval second{{1, 0}, {1, 0}};
  setitimer(ITIMER_PROF, &second, nullptr);
}

void begin_input(const char* target, std::string_view bytes) {
  bytes_now = bytes;
  target_now = target;
  inputs.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace asyncfabric::fuzz

// What one input may take of memory; leaks are looked for at the end.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=256:hard_rss_limit_mb=2048:quarantine_size_mb=16:abort_on_error=0:detect_leaks=1:"
         "strict_string_checks=1:detect_stack_use_after_return=0";
}
extern "C" const char* __ubsan_default_options();
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }
