//! The secret that the ranks of a job may share, by which they recognise each other.

use std::fmt;
use std::fs::File;
use std::io::Read;

use crate::error::{Error, Problem, Result};
use crate::rendezvous::Lookup;

/// The variable with the secret.
pub(crate) const SECRET: &str = "DDP_JOB_SECRET";

const ACTION: &str = "recognise the other ranks";

/// A key made of the secret; None without one.
#[derive(Clone)]
pub(crate) struct Secret(Option<[u8; blake3::KEY_LEN]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(crate) fn read(lookup: Lookup<'_>) -> Result<Secret> {
        match lookup(SECRET) {
            Some(text) if text.is_empty() => {
                let reason = format!("{SECRET}: expected a text, got an empty one");
                let help = "give all ranks the same text, or unset it on all";
                Err(Error::Launch(Problem::new(ACTION, reason, help)))
            }
            text => Ok(Secret::new(text.as_deref())),
        }
    }

    pub(super) fn new(text: Option<&str>) -> Secret {
        const CONTEXT: &str = "ddp-train 2026 ranks of a job recognise each other";
        Secret(text.map(|text| blake3::derive_key(CONTEXT, text.as_bytes())))
    }

    pub(super) fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// What only a holder of the secret can say about these words; empty without a secret.
    pub(super) fn proof(&self, words: &[&str]) -> String {
        let Some(key) = &self.0 else {
            return String::new();
        };
        let mut hasher = blake3::Hasher::new_keyed(key);
        for word in words {
            hasher.update(&(word.len() as u64).to_le_bytes());
            hasher.update(word.as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Whether `proof` is that of these words, in a time that does not depend on it.
    pub(super) fn accepts(&self, words: &[&str], proof: &str) -> bool {
        let hash = |text: &str| blake3::Hash::from_hex(text).ok();
        if self.is_set() {
            return hash(proof).is_some_and(|proof| hash(&self.proof(words)) == Some(proof));
        }
        proof.is_empty()
    }
}

/// The secret of a job that this process starts: what the user has set, or a new one.
pub(crate) fn job_secret() -> Result<String> {
    std::env::var(SECRET).or_else(|_| nonce())
}

/// A text that is never used twice.
pub(crate) fn nonce() -> Result<String> {
    let mut bytes = [0u8; blake3::OUT_LEN];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    let help = "make /dev/urandom readable";
    read.map_err(|error| Error::setup("read random bytes", error, help))?;
    Ok(blake3::Hash::from_bytes(bytes).to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_secret_accepts_a_proof_and_only_of_the_same_words() {
        let [one, other, none] = [Some("a secret"), Some("another"), None].map(Secret::new);
        let proof = one.proof(&["client", "1"]);
        assert!(one.accepts(&["client", "1"], &proof));
        for words in [&["client", "2"][..], &["server", "1"], &["client1"]] {
            assert!(!one.accepts(words, &proof), "{words:?}");
        }
        assert!(!other.accepts(&["client", "1"], &proof));
        assert!(!none.accepts(&["client", "1"], &proof) && none.accepts(&["x"], ""));
        assert!(!one.accepts(&["client", "1"], "") && !one.accepts(&[], "garbage"));
        assert_ne!(nonce().unwrap(), nonce().unwrap());
        assert_eq!(format!("{one:?}"), "Secret");
        let empty = Secret::read(&|_| Some(String::new())).unwrap_err();
        assert!(empty.to_string().ends_with("or unset it on all"), "{empty}");
    }
}
