// sha256_test.cc: the examples of FIPS 180-4 and the test cases of RFC 4231.
#include "secret/sha256.h"

#include <gtest/gtest.h>

#include <string>

namespace asyncfabric::secret {
namespace {

std::string hex(const Digest& digest) {
  std::string out;
  for (const uint8_t byte : digest)
    for (const int half : {byte >> 4, byte & 15}) out += "0123456789abcdef"[half];
  return out;
}

TEST(Sha256, ExamplesOfTheStandard) {
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(HmacSha256, TestCasesOfRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\xaa'), std::string(50, '\xdd'))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "This is a test using a larger than block-size key and a larger than block-size data. The "
                            "key needs to be hashed before being used by the HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Comparison, FindsEachBitAndEachLength) {
  const std::string one(32, 'x');
  EXPECT_TRUE(equal_in_constant_time(one, one));
  for (size_t i = 0; i < one.size(); ++i) {
    std::string other = one;
    other[i] = static_cast<char>(other[i] ^ 1);
    EXPECT_FALSE(equal_in_constant_time(one, other)) << i;
  }
  EXPECT_FALSE(equal_in_constant_time(one, one.substr(1)));
}

}  // namespace
}  // namespace asyncfabric::secret
