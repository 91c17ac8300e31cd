//! Shells complete commands, flags and values.

use super::*;

/// What is typed after `ddp-train`, and what its last word becomes.
const COMPLETED: [(&str, &str); 7] = [
    ("tokeni", "tokenize"),
    ("eval --checkp", "--checkpoint"),
    ("bench mlp --lay", "--layers"),
    ("--model gpt-t", "gpt-tiny"),
    ("train --device au", "auto"),
    ("resume out --activation gelu-", "gelu-tanh"),
    ("predict --log-level war", "warn"),
];

/// The last words that a shell's script prints after completing the lines of `COMPLETED`.
#[track_caller]
fn assert_completes(shell: &str, script: &str) {
    let folder = Folder::new(shell);
    let typed = COMPLETED.map(|(typed, _)| typed);
    let ended = std::process::Command::new(shell)
        .current_dir(folder.path())
        .args(["-c", script, shell, &program()])
        .args(typed)
        .output();
    let ended = match ended {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            ddp_testing::skip(&format!("no {shell}"));
            return;
        }
        ended => ended.unwrap(),
    };
    let lines = String::from_utf8(ended.stdout).unwrap();
    let last = lines
        .lines()
        .map(|line| line.split(' ').next_back().unwrap_or_default());
    let last: Vec<&str> = last.collect();
    assert_eq!(last, COMPLETED.map(|(_, completed)| completed), "{lines}");
}

#[test]
fn bash_completes_commands_flags_and_values() {
    assert_completes(
        "bash",
        "source <(\"$1\" completions bash); shift
        for line; do
            COMP_WORDS=(ddp-train $line)
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            _ddp__train ddp-train \"${COMP_WORDS[-1]}\" \"${COMP_WORDS[-2]}\"
            echo \"${COMPREPLY[*]}\"
        done",
    );
}

#[test]
fn bash_completes_files_itself_where_a_path_stands() {
    let script = "source <(\"$1\" completions bash); COMP_WORDS=(ddp-train watch '') COMP_CWORD=2
        _ddp__train ddp-train '' watch; echo \"${COMPREPLY[*]}\"";
    let ended = std::process::Command::new("bash")
        .args(["-c", script, "bash", &program()])
        .output();
    assert_eq!(
        ended.unwrap().stdout,
        b"\n",
        "no flags, so the shell's default counts"
    );
}

#[test]
fn zsh_completes_commands_flags_and_values() {
    // An interactive shell in which a tab is pressed. What it then runs keeps its words.
    assert_completes(
        "zsh",
        "zmodload zsh/zpty; zpty shell zsh -f
        zpty -w shell \"autoload -Uz compinit; compinit -u -D; source <($1 completions zsh)\"
        zpty -w shell 'ddp-train() { print -r -- $* >>words }'; shift
        for line; do zpty -w -n shell \"ddp-train $line\"$'\\t\\r'; done
        zpty -w shell exit
        while zpty -r shell seen; do :; done
        cat words",
    );
}
