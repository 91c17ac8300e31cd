use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

const LONG: &str = "a secret of some length";

impl Secret {
    /// That of a variable with this text; None is a trusted network.
    pub(in crate::transport::tcp) fn new(text: Option<&str>) -> Secret {
        let source = text.map_or(SecretSource::TrustedNetwork, |_| SecretSource::Variable);
        Secret::of(source, text.unwrap_or_default().as_bytes())
    }
}

fn text(text: &str) -> Secret {
    Secret::new(Some(text))
}

#[test]
fn only_the_same_secret_accepts_a_proof_and_only_of_the_same_words() {
    let (one, other) = (text("a secret"), text("another"));
    let proof = one.proof(&["client", "1"]).to_hex();
    assert!(one.accepts(&["client", "1"], &proof));
    for words in [&["client", "2"][..], &["server", "1"], &["client1"]] {
        assert!(!one.accepts(words, &proof), "{words:?}");
    }
    assert!(!other.accepts(&["client", "1"], &proof));
    assert!(!one.accepts(&["client", "1"], "") && !one.accepts(&[], "garbage"));
    assert_ne!(nonce().unwrap(), nonce().unwrap());
    assert_eq!(format!("{one:?}"), "Secret");
}

#[test]
fn a_short_secret_is_refused() {
    let read = |text: &str| Secret::read(&|name| (name == SECRET).then(|| text.into()));
    for short in ["", "none ", "sesame", "123456789abcdef"] {
        let error = read(short).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let got = format!("expected at least 16 bytes, got {}", short.len());
        assert!(error.to_string().contains(&got), "{error}");
    }
    assert!(!read(LONG).unwrap().is_open());
    assert!(read("none").unwrap().is_open());
    let wrong = Secret::read(&|name| (name == MACS).then(|| "some".into())).unwrap_err();
    assert!(
        wrong.to_string().contains("DDP_JOB_MAC: expected all, got"),
        "{wrong}"
    );
}

/// A home folder that is removed at the end.
struct Home(PathBuf);

impl Home {
    fn new(name: &str) -> Home {
        let path = std::env::temp_dir().join(format!("ddp-home-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Home(path)
    }

    fn secret(&self) -> Result<Secret> {
        let home = self.0.to_str().unwrap().to_string();
        Secret::read(&|name| (name == "HOME").then(|| home.clone()))
    }

    fn key(&self) -> PathBuf {
        self.0.join(KEY_FILE)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn processes_that_start_at_once_make_one_key_which_others_cannot_read() {
    let home = Home::new("one");
    let proofs: Vec<_> = std::thread::scope(|scope| {
        let read = || home.secret().unwrap().proof(&["x"]);
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(read)).collect();
        threads.into_iter().map(|it| it.join().unwrap()).collect()
    });
    assert!(proofs.iter().all(|proof| *proof == proofs[0]));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&home.key()), 0o600);
    assert_eq!(mode(home.key().parent().unwrap()), 0o700);
    let left = fs::read_dir(home.key().parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "only the key is left");
    let other = Home::new("other");
    assert_ne!(other.secret().unwrap().proof(&["x"]), proofs[0]);
}

#[test]
fn a_key_that_another_user_could_have_written_or_read_is_refused() {
    let home = Home::new("planted");
    home.secret().unwrap();
    let refused = |told: &str| {
        let error = home.secret().unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(told), "{error}");
    };
    let readable = fs::Permissions::from_mode(0o640);
    fs::set_permissions(home.key(), readable).unwrap();
    refused("others may read or write it (mode 640)");
    fs::remove_file(home.key()).unwrap();
    fs::write(home.0.join("elsewhere"), [7; 32]).unwrap();
    fs::set_permissions(home.0.join("elsewhere"), fs::Permissions::from_mode(0o644)).unwrap();
    symlink(home.0.join("elsewhere"), home.key()).unwrap();
    refused("others may read or write it (mode 644)");
    fs::remove_file(home.key()).unwrap();
    fs::write(home.key(), b"short").unwrap();
    refused("expected a file of 32 bytes");
    fs::write(home.key(), [7; 32]).unwrap();
    fs::set_permissions(home.key(), fs::Permissions::from_mode(0o600)).unwrap();
    if std::os::unix::fs::chown(home.key(), Some(65534), None).is_err() {
        return ddp_testing::skip("only root can give a file to another user");
    }
    refused("got one of user 65534");
}
