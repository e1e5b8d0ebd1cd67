// wake_loop.cc: what the kernel and the caches charge for notifying somebody: eventfd wake-ups between processes, one TCP
// stream, and two threads spinning on two cache lines. Runs on the calling thread; spin_round_trips starts one more and joins it.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "asyncfabric/bench.h"

namespace asyncfabric::bench {
namespace {

LimitResult finished(int error, uint64_t started) { return {error, monotonic_ns() - started, started}; }

int eventfd_add(int descriptor) {
  const uint64_t one = 1;
  return write(descriptor, &one, sizeof one) == sizeof one ? 0 : errno;
}

int eventfd_take(int descriptor) {
  uint64_t value = 0;
  for (;;) {
    if (read(descriptor, &value, sizeof value) == sizeof value) return 0;
    if (errno != EINTR) return errno;
  }
}

int send_all(int socket, const uint8_t* source, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t moved = send(socket, source, bytes, MSG_NOSIGNAL);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : EPIPE;
    source += moved;
    bytes -= static_cast<uint64_t>(moved);
  }
  return 0;
}

int receive_all(int socket, uint8_t* target, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t moved = recv(socket, target, bytes, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : EPIPE;
    target += moved;
    bytes -= static_cast<uint64_t>(moved);
  }
  return 0;
}

struct alignas(64) Line {
  std::atomic<uint64_t> value{0};  // one thread stores it (release), the other spins on it (acquire)
};

void spin_until(const std::atomic<uint64_t>& word, uint64_t wanted) {
  // Yields now and then: with one core, or one that is taken, pure spinning would wait for the end of a time slice.
  for (uint32_t turns = 0; word.load(std::memory_order_acquire) != wanted; ++turns) {
    if (turns > 20'000) {
      std::this_thread::yield();
      turns = 0;
    }
  }
}

}  // namespace

LimitResult stream_send(int32_t socket, const void* source, uint64_t region_bytes, uint64_t op_bytes, uint64_t count) {
  const uint64_t slots = region_bytes / op_bytes;
  const uint64_t started = monotonic_ns();
  int error = 0;
  for (uint64_t i = 0, slot = 0; i < count && error == 0; ++i, slot = slot + 1 == slots ? 0 : slot + 1) {
    error = send_all(socket, static_cast<const uint8_t*>(source) + slot * op_bytes, op_bytes);
  }
  uint8_t acknowledged = 0;
  if (error == 0) error = receive_all(socket, &acknowledged, 1);
  return finished(error, started);
}

LimitResult stream_receive(int32_t socket, void* target, uint64_t region_bytes, uint64_t total_bytes) {
  const uint64_t started = monotonic_ns();
  int error = 0;
  for (uint64_t done = 0; done < total_bytes && error == 0;) {
    const uint64_t offset = done % region_bytes;
    const uint64_t chunk = std::min(total_bytes - done, std::min<uint64_t>(region_bytes - offset, 1u << 20));
    error = receive_all(socket, static_cast<uint8_t*>(target) + offset, chunk);
    done += chunk;
  }
  const uint8_t acknowledge = 1;
  if (error == 0) error = send_all(socket, &acknowledge, 1);
  return finished(error, started);
}

LimitResult eventfd_ping(int32_t out, int32_t in, uint64_t count, uint64_t* samples_ns) {
  const uint64_t started = monotonic_ns();
  uint64_t before = started;
  for (uint64_t i = 0; i < count; ++i) {
    int error = eventfd_add(out);
    if (error == 0) error = eventfd_take(in);
    if (error != 0) return finished(error, started);
    const uint64_t now = monotonic_ns();
    samples_ns[i] = now - before;
    before = now;
  }
  return finished(0, started);
}

LimitResult eventfd_pong(int32_t out, int32_t in, uint64_t count) {
  const uint64_t started = monotonic_ns();
  for (uint64_t i = 0; i < count; ++i) {
    int error = eventfd_take(in);
    if (error == 0) error = eventfd_add(out);
    if (error != 0) return finished(error, started);
  }
  return finished(0, started);
}

LimitResult spin_round_trips(uint64_t count, uint64_t* samples_ns) {
  Line there;  // stored by this thread, read by `echo`
  Line back;   // stored by `echo`, read by this thread
  std::thread echo([&] {
    for (uint64_t i = 1; i <= count; ++i) {
      spin_until(there.value, i);
      back.value.store(i, std::memory_order_release);
    }
  });
  const uint64_t started = monotonic_ns();
  uint64_t before = started;
  for (uint64_t i = 1; i <= count; ++i) {
    there.value.store(i, std::memory_order_release);
    spin_until(back.value, i);
    const uint64_t now = monotonic_ns();
    samples_ns[i - 1] = now - before;
    before = now;
  }
  echo.join();
  return finished(0, started);
}

}  // namespace asyncfabric::bench
