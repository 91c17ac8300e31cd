//! Checks of this repository's structure; `launch/test` runs `ddp-house all`.

mod api;
mod cycles;
mod edges;
mod errors;
mod lines;
mod modules;
mod operations;
mod packages;
mod rooms;
#[cfg(test)]
mod tests;
mod waits;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use edges::Parts;
use modules::Crate;

const USAGE: &str = "usage: ddp-house CHECK, in the workspace's root

cycles [CRATE…]  cycles inside crates, of files and of top-level modules
comments         lines with comments over 100 columns
rooms            which crate uses which; where unsafe, cudarc and mpi are
operations       prints docs/operations.md, the table of all operations
api              prints tests/house/api.txt, what the libraries export
lines            code lines of each crate, without blanks, comments and tests
errors           errors that say what was expected and got, and not what helps
waits            sleeps and short limits of time in tests
all              all of these, against tests/house/limits.toml";

/// Crates whose top-level modules may be a circle, of which only the files are checked: the objects
/// of the driver that the simulator plays refer to each other.
const ONE_CIRCLE: [&str; 1] = ["ddp-simcuda"];

/// Whether a check passed, or why it could not run.
type Outcome = Result<bool, String>;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let check = arguments.next().unwrap_or_default();
    let names: Vec<String> = arguments.collect();
    let outcome = match check.as_str() {
        "cycles" => packages::find(&names).and_then(|found| check_cycles(&found)),
        "comments" => check_comments(0),
        "rooms" => check_rooms(),
        "operations" => operations::page().map(|page| {
            print!("{page}");
            true
        }),
        "api" => api::page().map(|page| {
            print!("{page}");
            true
        }),
        "lines" => check_lines(usize::MAX),
        "errors" => check_errors(),
        "waits" => check_waits(0),
        "all" => check_all(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("ddp-house: {message}");
            ExitCode::FAILURE
        }
    }
}

fn check_all() -> Outcome {
    const LIMITS: &str = "tests/house/limits.toml";
    let text = fs::read_to_string(LIMITS).map_err(|e| format!("cannot read {LIMITS}: {e}"))?;
    let limits: toml::Table = text.parse().map_err(|e| format!("{LIMITS}: {e}"))?;
    let number = |name: &str| {
        let value = limits.get(name).and_then(|value| value.as_integer());
        value
            .and_then(|value| usize::try_from(value).ok())
            .ok_or_else(|| format!("{LIMITS}: {name} is not a number"))
    };
    let names = limits.get("acyclic").and_then(|list| list.as_array());
    let names: Vec<String> = names
        .into_iter()
        .flatten()
        .filter_map(|name| Some(name.as_str()?.to_owned()))
        .collect();
    let acyclic = if names.is_empty() {
        true
    } else {
        check_cycles(&packages::find(&names)?)?
    };
    let comments = check_comments(number("long_comments_max")?)?;
    let rooms = check_rooms()?;
    let operations = operations::check()?;
    let api = api::check()?;
    let lines = check_lines(number("code_lines_max")?)?;
    let errors = check_errors()?;
    let waits = check_waits(number("sleeps_max")?)?;
    Ok(acyclic && comments && rooms && operations && api && lines && errors && waits)
}

fn check_cycles(packages: &[packages::Package]) -> Outcome {
    let mut clean = true;
    for package in packages {
        let mut sums = [0; 2];
        let may_be_circle = ONE_CIRCLE.contains(&package.name.as_str());
        for root in &package.roots {
            let krate = Crate::read(root)?;
            for (sum, parts) in sums.iter_mut().zip([Parts::Files, Parts::TopLevelModules]) {
                if may_be_circle && parts == Parts::TopLevelModules {
                    continue;
                }
                for cycle in cycles::cycles(&krate, parts) {
                    *sum += cycle.parts.len();
                    println!("{}: {}", package.name, cycle.text);
                }
            }
        }
        let [files, modules] = sums;
        clean &= sums == [0, 0];
        println!(
            "{}: {files} files and {modules} top-level modules in cycles",
            package.name
        );
    }
    Ok(clean)
}

fn check_comments(limit: usize) -> Outcome {
    let mut count = 0;
    let mut shown = Vec::new();
    for path in lines::sources(Path::new("."), &["rs", "cu", "cuh"]) {
        let text = fs::read_to_string(&path)
            .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        for line in lines::long_comments(&text) {
            count += 1;
            let path = path.strip_prefix(".").unwrap_or(&path);
            shown.push(format!("{}:{line}", path.display()));
        }
    }
    println!("comments over 100 columns: {count}, at most {limit}");
    if count > limit {
        println!("{}", shown.join("\n"));
    }
    Ok(count <= limit)
}

fn check_waits(sleeps_max: usize) -> Outcome {
    let (mut sleeps, mut limits) = (Vec::new(), Vec::new());
    for path in lines::sources(Path::new("."), &["rs"]) {
        let text = fs::read_to_string(&path)
            .map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let path = path.strip_prefix(".").unwrap_or(&path);
        let found = waits::of(path, &text);
        let shown = |line| format!("{}:{line}", path.display());
        sleeps.extend(found.sleeps.into_iter().map(shown));
        limits.extend(found.limits.into_iter().map(shown));
    }
    println!(
        "sleeps in tests without a reason: {}, at most {sleeps_max}; limits of time under 60 s: {}",
        sleeps.len(),
        limits.len()
    );
    if sleeps.len() > sleeps_max {
        println!("{}", sleeps.join("\n"));
    }
    if !limits.is_empty() {
        println!("{}", limits.join("\n"));
    }
    Ok(sleeps.len() <= sleeps_max && limits.is_empty())
}

fn check_errors() -> Outcome {
    let mut shown = Vec::new();
    let packages = packages::find(&[])?;
    for package in packages.iter().filter(|package| package.is_product()) {
        for root in &package.roots {
            let krate = Crate::read(root)?;
            for module in &krate.modules {
                let found = module.tokens.iter().flat_map(errors::without_help);
                let file = krate.files[module.file].display();
                shown.extend(found.map(|(line, text)| format!("{file}:{line}: {text}")));
            }
        }
    }
    println!("errors without help: {}", shown.len());
    for error in &shown {
        println!("  {error}");
    }
    Ok(shown.is_empty())
}

fn check_rooms() -> Outcome {
    let violations = rooms::violations(&packages::find(&[])?)?;
    println!("violations of the crates' rules: {}", violations.len());
    for violation in &violations {
        println!("  {violation}");
    }
    Ok(violations.is_empty())
}

fn check_lines(limit: usize) -> Outcome {
    let packages = packages::find(&[])?;
    let folders = packages
        .iter()
        .map(|package| (package.name.clone(), package.folder.clone()));
    let counts = lines::by_crate(&folders.collect::<Vec<_>>());
    println!("code lines, without blanks, comments and tests:");
    let mut sum = 0;
    for package in &packages {
        if package.is_product() {
            sum += counts[&package.name];
            println!("{:8}  {}", counts[&package.name], package.name);
        }
    }
    println!("{sum:8}  together");
    if sum > limit {
        println!("more than code_lines_max = {limit} in tests/house/limits.toml");
    }
    Ok(sum <= limit)
}
