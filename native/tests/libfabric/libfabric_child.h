// libfabric_child.h: a second process for the libfabric tests: this test binary, executed again in a role. The roles are tests
// of their own that gtest skips unless the environment names them, so that the child is a fresh process and not a fork of one
// that has already opened libfabric.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "libfabric_pair.h"

namespace asyncfabric::testing {

constexpr int kChildFd = 100;  // the child's end of the control socket

inline void send_text(int fd, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size());
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
  bytes += text;
  // A reader that died fails this test; SIGPIPE would end all of them, without a word.
  EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

inline std::string receive_text(int fd) {  // "" when the other end is gone
  uint32_t size = 0;
  if (recv(fd, &size, sizeof size, MSG_WAITALL) != sizeof size || size > 100000) return "";
  std::string text(size, '\0');
  if (recv(fd, text.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) return "";
  return text;
}

inline bool has_input(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

class Child {
 public:
  Child(const std::string& role, const std::string& provider) {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    control = fds[0];
    // Spawned, not forked: the threads that libfabric started may hold locks of the library that setenv() wants.
    std::vector<std::string> variables = {"ASYNCFABRIC_TEST_ROLE=" + role, "ASYNCFABRIC_TEST_PROVIDER=" + provider};
    for (char** variable = environ; *variable != nullptr; ++variable)
      if (!std::string_view(*variable).starts_with("GTEST_"))  // the role is one test, which another shard would have
        variables.emplace_back(*variable);
    std::vector<char*> environment;
    for (std::string& variable : variables) environment.push_back(variable.data());
    environment.push_back(nullptr);
    char name[] = "libfabric_child", filter[] = "--gtest_filter=LibfabricChildRole.*", brief[] = "--gtest_brief=1";
    char* const arguments[] = {name, filter, brief, nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], kChildFd);
    if (posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, arguments, environment.data()) != 0) std::abort();
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
  }
  ~Child() {
    die();
    close(control);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int finish() {  // asks it to end and returns its exit code
    shutdown(control, SHUT_WR);
    return reap();
  }

  int status_of_death() { return pid > 0 ? reap() : -1; }  // of one whose end of the control socket is gone

  void die() {
    if (pid == 0) return;
    send_signal(SIGKILL);
    (void)reap();
  }

  void send_signal(int number) const {
    ASSERT_GT(pid, 0);  // kill(-1) would end every process of this machine
    kill(pid, number);
  }

  int control = -1;
  pid_t pid = 0;  // 0: it was reaped

 private:
  int reap() {
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
};

inline std::string child_role() {
  const char* role = getenv("ASYNCFABRIC_TEST_ROLE");
  return role != nullptr ? role : "";
}

}  // namespace asyncfabric::testing
