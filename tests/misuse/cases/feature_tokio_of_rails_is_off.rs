use ibverbs_rails::RailsDriver;

fn drive(driver: RailsDriver) {
    let _ = driver.run_on_tokio(); //~ ERROR
    let _ = driver; //~ RIGHT
}
