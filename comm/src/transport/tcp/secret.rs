//! The secret that the ranks of a job share, by which they recognise each other and each other's
//! messages: `DDP_JOB_SECRET`, or else a key that this user's processes make and share.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Problem, Result};
use crate::rendezvous::Lookup;

/// The variable with the secret.
pub(crate) const SECRET: &str = "DDP_JOB_SECRET";
/// What the variable says on a network where everybody is trusted.
const TRUSTED_NETWORK: &str = "none";
/// A shorter secret could be guessed from a proof, which whoever holds a port can collect.
const SECRET_BYTES_MIN: usize = 16;
/// The variable that says whether MACs cover long payloads of sums, too: `all`.
const MACS: &str = "DDP_JOB_MAC";
/// Where this user's key is, below the home folder.
pub(super) const KEY_FILE: &str = ".config/ddp-train/key";

const ACTION: &str = "recognise the other ranks";
const CONTEXT: &str = "ddp-train 2026 ranks of a job recognise each other";

pub(crate) type Key = [u8; blake3::KEY_LEN];

/// Where a rank's secret comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SecretSource {
    /// `DDP_JOB_SECRET`.
    Variable,
    /// The key of this user.
    KeyFile,
    /// `DDP_JOB_SECRET=none`: whoever reaches the ports is trusted.
    TrustedNetwork,
}

/// A key made of the secret.
#[derive(Clone)]
pub(crate) struct Secret {
    pub(super) source: SecretSource,
    key: Key,
    /// Whether MACs cover long payloads, too. On a connection they do if one end wants it.
    pub(super) covers_all: bool,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    pub(crate) fn read(lookup: Lookup<'_>) -> Result<Secret> {
        let covers_all = match lookup(MACS).as_deref() {
            None => false,
            Some("all") => true,
            Some(other) => {
                let reason = format!("{MACS}: expected all, got {other:?}");
                return Err(Error::Launch(Problem::new(
                    ACTION,
                    reason,
                    "unset it, or use all",
                )));
            }
        };
        let secret = Secret::find(lookup)?;
        Ok(Secret {
            covers_all,
            ..secret
        })
    }

    fn find(lookup: Lookup<'_>) -> Result<Secret> {
        let refused = |reason: String| {
            let help = format!(
                "give all ranks the same text, such as `openssl rand -hex 32` prints, or unset {SECRET} on all"
            );
            Err(Error::Launch(Problem::new(ACTION, reason, help)))
        };
        match lookup(SECRET).as_deref() {
            None => Secret::of_user(lookup),
            Some(TRUSTED_NETWORK) => Ok(Secret::of(
                SecretSource::TrustedNetwork,
                TRUSTED_NETWORK.as_bytes(),
            )),
            Some(text) if text.len() < SECRET_BYTES_MIN => refused(format!(
                "{SECRET}: expected at least {SECRET_BYTES_MIN} bytes, got {}",
                text.len()
            )),
            Some(text) => Ok(Secret::of(SecretSource::Variable, text.as_bytes())),
        }
    }

    fn of_user(lookup: Lookup<'_>) -> Result<Secret> {
        let home = lookup("HOME").filter(|home| Path::new(home).is_absolute());
        let path = home.map(|home| Path::new(&home).join(KEY_FILE));
        let missing = || io::Error::new(ErrorKind::NotFound, "HOME is not set");
        let key = path.as_deref().ok_or_else(missing).and_then(key_at);
        let key = key.map_err(|error| {
            let path = path.unwrap_or_else(|| PathBuf::from("~").join(KEY_FILE));
            let reason = format!("the key {}: {error}", path.display());
            let help = format!(
                "make it possible to read or make it, or give all ranks the same {SECRET}, such as `openssl rand -hex 32` prints"
            );
            Error::Launch(Problem::new(ACTION, reason, help))
        })?;
        Ok(Secret::of(SecretSource::KeyFile, &key))
    }

    pub(super) fn of(source: SecretSource, bytes: &[u8]) -> Secret {
        let key = blake3::derive_key(CONTEXT, bytes);
        let covers_all = false;
        Secret {
            source,
            key,
            covers_all,
        }
    }

    /// Whether anybody who reaches a port is taken for a rank.
    pub(crate) fn is_open(&self) -> bool {
        self.source == SecretSource::TrustedNetwork
    }

    /// What makes this host's secret that of the rank at `host`.
    pub(super) fn help(&self, host: IpAddr) -> String {
        match self.source {
            SecretSource::Variable => format!("set the same {SECRET} on all ranks"),
            SecretSource::TrustedNetwork => {
                format!("set {SECRET}=none on all ranks, or on none")
            }
            SecretSource::KeyFile => format!(
                "set the same {SECRET} on all ranks, or on none, and copy the key of {host}, if \
                 you trust it: scp {host}:{KEY_FILE} ~/{KEY_FILE}"
            ),
        }
    }

    /// What only a holder of the secret can say about these words.
    pub(crate) fn proof(&self, words: &[&str]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        for word in words {
            hasher.update(&(word.len() as u64).to_le_bytes());
            hasher.update(word.as_bytes());
        }
        hasher.finalize()
    }

    /// Whether `proof` is that of these words, in a time that does not depend on it.
    pub(super) fn accepts(&self, words: &[&str], proof: &str) -> bool {
        let proof = blake3::Hash::from_hex(proof);
        proof.is_ok_and(|proof| proof == self.proof(words))
    }
}

/// The key in this file, which is made if there is none.
fn key_at(path: &Path) -> io::Result<Key> {
    match read_key(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        read => return read,
    }
    let folder = path.parent().unwrap_or(path);
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    // The key appears whole: other ranks may look for it at this moment, and make one, too.
    let (name, key) = (random()?, random()?);
    let whole = folder.join(format!(".key-{}", name.to_hex()));
    let create = |path: &Path| {
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(key.as_bytes())
            .and_then(|()| file.sync_all())
    };
    let is_other = |error: &io::Error| error.kind() != ErrorKind::AlreadyExists;
    let linked = create(&whole).and_then(|()| fs::hard_link(&whole, path));
    _ = fs::remove_file(&whole);
    // Some file systems have no links.
    let made = linked.or_else(|error| {
        if is_other(&error) {
            create(path)
        } else {
            Err(error)
        }
    });
    match made {
        Err(error) if is_other(&error) => Err(error),
        _ => read_key(path),
    }
}

/// Only a file that this user alone can read and write is believed.
fn read_key(path: &Path) -> io::Result<Key> {
    // A pipe must not make this wait for a writer.
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let found = file.metadata()?;
    // SAFETY: geteuid takes nothing, touches nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    let length = blake3::KEY_LEN as u64;
    let wrong = if !found.is_file() || found.len() != length {
        format!("expected a file of {length} bytes; remove it, and a new one is made")
    } else if found.uid() != user {
        format!(
            "expected a file of this user ({user}), got one of user {}",
            found.uid()
        )
    } else if found.mode() & 0o077 != 0 {
        format!(
            "others may read or write it (mode {:o}); use chmod 600",
            found.mode() & 0o777
        )
    } else {
        let mut key = Key::default();
        return file.read_exact(&mut key).map(|()| key);
    };
    Err(io::Error::other(wrong))
}

/// The secret of the job with this number, which this process starts: made of what the user has
/// set, or a new one.
pub(crate) fn job_secret(number: &str) -> Result<String> {
    let lookup = |name: &str| std::env::var(name).ok();
    match lookup(SECRET) {
        None => nonce(),
        Some(text) if text == TRUSTED_NETWORK => Ok(text),
        Some(_) => Ok(Secret::find(&lookup)?.proof(&[number]).to_hex().to_string()),
    }
}

/// A text that is never used twice.
pub(crate) fn nonce() -> Result<String> {
    let help = "make /dev/urandom readable";
    let bytes = random().map_err(|error| Error::setup("read random bytes", error, help))?;
    Ok(bytes.to_hex().to_string())
}

fn random() -> io::Result<blake3::Hash> {
    let mut bytes = Key::default();
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(blake3::Hash::from_bytes(bytes))
}

#[cfg(test)]
mod tests;
