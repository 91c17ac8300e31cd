//! Which checkpoints stay, and which one is used.

use super::*;

#[test]
fn the_newest_stay_and_the_best_and_each_save_waits_for_the_one_before() {
    quietly();
    for (keep, best, expected) in [
        (3, None, &[4, 5, 6][..]),
        (1, None, &[6]),
        (1, Some(2), &[2, 6]),
        (2, Some(6), &[5, 6]),
        (2, Some(3), &[3, 5, 6]),
    ] {
        let folder = Folder::new();
        on_ranks(2, Some(1), |world| {
            let mut step = case(sgd(0.0)).step(world)?;
            let mut saver = Saver::new(world, &folder.0, keep)?;
            for number in 1..=6 {
                // At first something that is beaten later.
                let best = if number < 3 { Some(1) } else { best };
                let best = best.filter(|&best| best <= number).map(|step| Best {
                    step,
                    loss: 1.0,
                    ..Best::default()
                });
                saver.save(
                    &mut step,
                    State {
                        best,
                        ..state(world, number)
                    },
                )?;
                saver.check()?;
            }
            saver.finish()?;
            assert_eq!(
                saver
                    .written()
                    .into_iter()
                    .map(|(step, _)| step)
                    .collect::<Vec<_>>(),
                [1, 2, 3, 4, 5, 6]
            );
            Ok(())
        });
        let names: Vec<String> = expected
            .iter()
            .map(|step| format!("step-{step:08}"))
            .collect();
        assert_eq!(
            names_in(&folder.0.join("checkpoints")),
            names,
            "--keep {keep}, best {best:?}"
        );
    }
}

#[test]
fn the_best_checkpoint_is_used_if_intact_else_the_newest() {
    quietly();
    let folder = Folder::new();
    assert!(
        checkpoint::best(&folder.0)
            .unwrap_err()
            .to_string()
            .contains("an intact checkpoint in it, got none;")
    );
    on_ranks(1, None, |world| {
        let mut step = case(sgd(0.0)).step(world)?;
        let mut saver = Saver::new(world, &folder.0, 1)?;
        for number in 1..=3 {
            let best = Some(Best {
                step: 1,
                loss: 1.0,
                ..Best::default()
            });
            saver.save(
                &mut step,
                State {
                    best,
                    ..state(world, number)
                },
            )?;
        }
        saver.finish()
    });
    assert_eq!(checkpoint::best(&folder.0).unwrap().opened.state.step, 1);
    fs::write(
        checkpoint::folder(&folder.0, 1).join("model.safetensors"),
        "x",
    )
    .unwrap();
    assert_eq!(checkpoint::best(&folder.0).unwrap().opened.state.step, 3);
    fs::remove_dir_all(checkpoint::folder(&folder.0, 1)).unwrap();
    assert_eq!(checkpoint::best(&folder.0).unwrap().opened.state.step, 3);
    fs::write(
        checkpoint::folder(&folder.0, 3).join("model.safetensors"),
        "x",
    )
    .unwrap();
    assert!(
        checkpoint::best(&folder.0)
            .unwrap_err()
            .to_string()
            .contains("got none that is intact: ")
    );
}

#[test]
fn hosts_without_a_shared_folder_are_refused_by_name() {
    quietly();
    let folders = [Folder::new(), Folder::new()];
    let errors = try_on_ranks(2, None, |world| {
        let case = Case {
            zero: true,
            ..case(Rule::adamw())
        };
        let mut step = case.step(world)?;
        let mut saver = Saver::new(world, &folders[world.rank()].0, 3)?;
        saver.save(&mut step, state(world, 1))?;
        saver.finish()
    });
    for error in errors {
        let error = error.unwrap_err();
        assert_eq!(error.exit_code(), 74);
        let text = error.to_string();
        // Each lacks the other's files. The program adds the rank that reports it.
        assert!(
            text.contains("all hosts share") && text.contains("`zero` 0"),
            "{text}"
        );
    }
    assert_eq!(names_in(&folders[0].0.join("checkpoints")), [""; 0]);
    assert_eq!(names_in(&folders[1].0), [""; 0]);
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
