// proof.h: what two fabrics show each other to prove that they have the same secret: a nonce for each entry of a peer, and a code over a whole
// message, header and payload, that ends with it. The header has kind, sender, target and life, so a message that is turned round, moved to
// another peer or kept for a later life has a wrong code. So has one that was sent to another address than it came to: whoever gets a peer to
// connect to it cannot pass on what that peer proves.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "secret/sha256.h"

namespace asyncfabric::secret {

using Nonce = std::array<char, 16>;

constexpr size_t kLeastSecretBytes = 16;
constexpr size_t kMostSecretBytes = 4096;

Nonce fresh_nonce();

inline std::string_view text_of(const Nonce& nonce) { return {nonce.data(), nonce.size()}; }

// Appends the code of header and payload to the payload, for the rail at this address.
void seal(std::string_view secret, std::string_view address, std::string_view header, std::string* payload);
// Takes the code off. False: it is not that of this secret; nothing of the payload may be believed.
bool unseal(std::string_view secret, std::string_view address, std::string_view header, std::string_view* payload);

}  // namespace asyncfabric::secret
