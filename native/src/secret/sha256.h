// sha256.h: SHA-256 (FIPS 180-4), HMAC over it (RFC 2104) and a comparison that takes the same time whatever differs. Pure functions, any
// thread. Own code, because the engine links no library; a handshake hashes a few hundred bytes, so no instruction set is asked for.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace asyncfabric::secret {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);
// False too where the lengths differ, which are no secret.
bool equal_in_constant_time(std::string_view one, std::string_view other);

inline std::string_view text_of(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace asyncfabric::secret
